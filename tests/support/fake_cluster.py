"""What engines and fronts ask of Ray and Serve, answered by the processes of one event loop."""

import asyncio
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deployments.fleet.cluster import ENGINE, Entry, Sleeping
from deployments.fleet.directory import CALL_TIMEOUT_S
from deployments.observe.metrics import Metrics
from llama_core.errors import NotReady
from tests.support.virtual_network import Process

NODE = "this node"


class QuietMetrics(Metrics):
    """Nothing refreshes them."""

    def __init__(self) -> None:
        super().__init__(in_ray=False)

    def watch(self, engine: Any) -> None:
        pass


class Replica(NamedTuple):
    deployment: str
    process: Process
    target: Any  # that is called


@dataclass
class FakeCluster:
    """replicas: those that Serve calls. running: applications that Serve has and does not remove. args: of each as it is
    configured now. entries: each model's adapters. digests: all that an adapter's name has had. is_away: the head. asleep:
    as of `Cluster`. invited: applications of each call for an engine."""

    replicas: list[Replica] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    args: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    entries: dict[str, dict[str, Entry]] = field(default_factory=dict)
    is_away: bool = False
    digests: dict[str, list[str]] = field(default_factory=dict)
    asleep: dict[str, Sleeping] | None = field(default_factory=dict)
    invited: list[str] = field(default_factory=list)

    def remove(self, target: Any) -> None:
        self.replicas = [replica for replica in self.replicas if replica.target is not target]


@dataclass
class Member:
    """Implements `Cluster` for one process."""

    cluster: FakeCluster
    application: str = ""
    node: str = NODE
    replica: str = "0"
    host: str = "127.0.0.1"
    http_host: str = "127.0.0.1"

    async def applications(self) -> Set[str]:
        return set() if self.cluster.is_away else set(self.cluster.running)

    async def asleep(self) -> Mapping[str, Sleeping] | None:
        return None if self.cluster.asleep is None else dict(self.cluster.asleep)

    async def invite(self, application: str) -> Any:
        self.cluster.invited.append(application)
        while True:
            for replica in self.cluster.replicas:
                if replica.deployment == ENGINE and replica.target._cluster.application == application:
                    return await replica.target.invitation()
            await asyncio.sleep(0.05)

    async def call_all(self, deployment: str, method: str, *args: Any) -> list[Any]:
        if self.cluster.is_away:
            return []
        calls = [
            replica.process.run(getattr(replica.target, method)(*args))
            for replica in self.cluster.replicas
            if replica.deployment == deployment
        ]
        for call in calls:
            call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        done, _ = await asyncio.wait(calls, timeout=CALL_TIMEOUT_S) if calls else (set(), None)
        return [call.result() for call in calls if call in done and call.exception() is None]

    async def deployed_args(self) -> dict[str, Any] | None:
        if self.cluster.is_away:
            raise TimeoutError
        return self.cluster.args.get(self.application)

    async def adapters(self, model: str) -> Mapping[str, Entry]:
        return dict(self._entries(model))

    async def put_adapter(self, model: str, name: str, entry: Entry, *, replaces: bool) -> bool:
        entries = self._entries(model)
        if name in entries and not replaces:
            return False
        entries[name] = entry
        self.cluster.digests.setdefault(name, []).append(entry.digest)
        return True

    async def remove_adapter(self, model: str, name: str) -> None:
        self._entries(model).pop(name, None)

    def _entries(self, model: str) -> dict[str, Entry]:
        if self.cluster.is_away:
            raise NotReady("Ray's control service does not answer")
        return self.cluster.entries.setdefault(model, {})
