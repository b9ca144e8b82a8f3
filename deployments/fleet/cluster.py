"""What engines and fronts ask of Ray and Serve: who else there is, and what all of them keep."""

from collections.abc import Mapping, Set
from typing import Any, Final, NamedTuple, Protocol

import msgspec

FRONT: Final = "LlamaIngress"  # names of deployments
ENGINE: Final = "LlamaEngine"


class Entry(msgspec.Struct, frozen=True):
    """An adapter that was loaded while engines serve. folder: as the caller gave it. digest: of its files at that time."""

    folder: str
    digest: str


class Sleeping(NamedTuple):
    """An application without an engine now; a call starts one. adapters: names of its model's."""

    application: str
    adapters: Set[str] = frozenset()


class Cluster(Protocol):
    """node: Ray's id of this process's node; host: its address. http_host: on which proxies listen. application: Serve's name
    of this process's application; replica: of this process.

    The methods for adapters raise NotReady while the cluster's store does not answer."""

    node: str
    host: str
    http_host: str
    application: str
    replica: str

    async def applications(self) -> Set[str]:
        """All that Serve has and does not remove; none while that is unknown."""

    async def asleep(self) -> Mapping[str, Sleeping] | None:
        """Sleeping applications by model; None while they are unknown."""

    async def invite(self, application: str) -> Any:
        """Ask Serve for an engine of the application, which starts one if there is none. Returns its `Invitation`."""

    async def call_all(self, deployment: str, method: str, *args: Any) -> list[Any]:
        """The results of all replicas of the deployments with this name, of those that answer."""

    async def deployed_args(self) -> dict[str, Any] | None:
        """Of this process's application as it is configured now; None where it is being removed, or may get other code."""

    async def adapters(self, model: str) -> Mapping[str, Entry]:
        """Those that are loaded, by name."""

    async def put_adapter(self, model: str, name: str, entry: Entry, *, replaces: bool) -> bool:
        """False if another entry exists and is not to be replaced."""

    async def remove_adapter(self, model: str, name: str) -> None: ...
