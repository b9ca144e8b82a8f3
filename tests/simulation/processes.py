"""The processes of a simulated cluster: the product's fronts and engines, over fake ranks."""

import asyncio
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from deployments.api_keys import digests_of
from deployments.args import IngressArgs, ServerArgs
from deployments.engine.interface import Models
from deployments.engine.service import LlamaService
from deployments.fleet.cluster import FRONT
from deployments.fleet.fleet import Fleet
from deployments.fleet.own_engine import OwnEngine
from deployments.fleet.served_model import ServedModel
from deployments.http.app import HttpApp
from deployments.replicas.front_process import FrontProcess, http_app_of, keys_of
from llama_core.files.digest import CheckpointDigest
from llama_core.rank_report import RankReport
from tests.conftest import GOLDEN
from tests.simulation.history import Setting
from tests.support import adapters
from tests.support.fake_cluster import NODE, FakeCluster, Member, QuietMetrics, Replica
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool
from tests.support.fake_ranks import arbitrary
from tests.support.fleets import FakeEngineProcess
from tests.support.virtual_network import Process

DRAIN_S: Final = 5.0
NUM_RANKS: Final = 2
ADAPTERS: Final = ("poet", "clerk", "cook")  # folders
OWNERS: Final = ("one", "two", "three")  # API keys
METRICS: Final = QuietMetrics()  # of all processes: nothing here reads them
FRONT_ARGS: Final = IngressArgs(api_key_digests=digests_of(",".join(OWNERS)), drain_timeout_s=DRAIN_S)


@cache
def lora_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="simulation-"))
    for seed, name in enumerate(ADAPTERS):
        adapters.write(root / name, GOLDEN / "mp2", adapters.SHAPES["attention"], seed)
    return root


@cache
def tokenizer_file(version: int) -> Path:
    """The same tokenizer in other bytes: with a field that the library ignores."""
    own = GOLDEN / "mp2" / "tokenizer.model"
    if not version:
        return own
    file = lora_root() / f"tokenizer-{version}" / own.name
    file.parent.mkdir()
    file.write_bytes(own.read_bytes() + b"\xc0\x0c" + bytes([version]))
    return file


@dataclass(frozen=True, slots=True)
class Release:
    """Of an application. weights, template, tokenizer: their versions."""

    weights: int = 0
    template: int = 0
    tokenizer: int = 0
    defaults: str = "builtin"


@dataclass(eq=False)
class Application:
    number: int
    release: Release = field(default_factory=Release)
    is_changing: bool = False
    has_had_rivals: bool = False
    max_queue: int | None = None  # as its operator has changed it
    has_updated: bool = False  # engines of another release have taken the places of all

    @property
    def name(self) -> str:
        return f"app-{self.number}"

    @property
    def model(self) -> str:
        return f"model-{self.number}"

    def args(self, setting: Setting) -> dict[str, Any]:
        """Of its engines, as an operator gives them."""
        mp = ("mp2", "mp1")[self.release.weights % 2]
        return {
            "model_id": self.model,
            "ckpt_dir": str(GOLDEN / mp),
            "tokenizer_path": str(tokenizer_file(self.release.tokenizer)),
            "model_parallel_size": NUM_RANKS,
            # The same answer at another time has another prompt.
            "chat_template": f"{{{{ strftime_now('%d') }}}} {self.number} {self.release.template}"
            "{% for t in tools or [] %}{% for name in t.function.parameters.properties %} {{ name }}{% endfor %}{% endfor %}"
            "{% for m in messages %} {{ m.content }}{% endfor %}",
            "sampling_defaults": self.release.defaults,
            "max_seq_len": 256,
            "max_batch_size": setting.max_batch_size,
            "max_queue": self.max_queue or setting.max_queue,
            "max_loras": setting.max_loras,
            "lora_root": str(lora_root()),
            "drain_timeout_s": DRAIN_S,
            "shrink_after_s": 1.0,
            "device": "cpu",
        }


def ranks_of(setting: Setting, weights: int) -> FakeGroup:
    """Ranks whose tokens depend on the weights, the adapter and the seed."""
    group = FakeGroup(num_blocks=400, step_s=setting.step_s)
    group.ranks.model = lambda tokens, seed: arbitrary(tokens, seed + salt(weights))
    group.ranks.deferrals = 0.1
    group.reports = (RankReport(digest=CheckpointDigest((("weights", str(weights)),))),)
    return group


def salt(weights: int) -> int:
    """What the weights add to a seed."""
    return 100_003 * weights


class SimulatedEngine(FakeEngineProcess):
    """weights, application: as when it started."""

    def __init__(self, setting: Setting, cluster: FakeCluster, application: Application) -> None:
        self.application, self.weights = application, application.release.weights
        self.is_gone = self.is_ending = False
        self.gone = asyncio.Event()
        super().__init__(
            lambda: ranks_of(setting, self.weights),
            Member(cluster, application.name),
            METRICS,
            **application.args(setting),
        )

    @property
    def serves(self) -> bool:
        """Whether a request would be taken, and computed at once."""
        is_up = not (self.is_gone or self.is_ending or self.process.stands_still or self.server is None)
        return is_up and self.service.readiness().ready

    def vanish(self) -> None:
        self.is_gone = True
        self.gone.set()
        self.member.cluster.remove(self.engine)


class SimulatedFront:
    """`service`: what its HTTP layer uses."""

    http_app: HttpApp
    service: Models

    def __init__(self) -> None:
        self.process = Process("front")
        self.is_open = self.is_gone = self.is_draining = False
        self.ended = asyncio.Event()  # its clients' connections end

    @property
    def fleet(self) -> Fleet | None:
        return None

    @property
    def models(self) -> list[ServedModel]:
        return [] if self.fleet is None else [*self.fleet._models.values()]

    def vanish(self) -> None:
        self.ended.set()

    async def ready(self) -> None:
        """Returns when Serve would send requests to it."""

    async def drain(self) -> None:
        """As Serve ends it."""

    async def stop(self) -> None:
        """For the end of a history."""


class FleetFront(SimulatedFront):
    def __init__(self, setting: Setting, cluster: FakeCluster) -> None:
        super().__init__()
        args = FRONT_ARGS.model_copy(
            update={"hold_timeout_s": setting.hold_timeout_s, "resume_window_s": setting.window_s}
        )
        node = (NODE, "another node")[len(cluster.replicas) % 2]  # where engines are reached by TCP
        self.of = self.process.call(lambda: FrontProcess(args, Member(cluster, "llama", node), METRICS))
        self.http_app, self.service = self.of._http_app, self.of.fleet
        cluster.replicas.append(Replica(FRONT, self.process, self.of))
        self._cluster = cluster

    @property
    def fleet(self) -> Fleet:
        return self.of.fleet

    def vanish(self) -> None:
        super().vanish()
        self._cluster.remove(self.of)

    async def ready(self) -> None:
        await self.process.run(self.of.check_health())

    async def drain(self) -> None:
        self._cluster.remove(self.of)
        await self.process.run(self.of.end())

    async def stop(self) -> None:
        self.of._searching.cancel()
        await self.of.fleet.stop()


class OwnRanks(SimulatedFront):
    """A replica of `build_app`."""

    def __init__(self, setting: Setting, cluster: FakeCluster, application: Application) -> None:
        super().__init__()
        self.groups = FakeGroupPool(lambda: ranks_of(setting, 0))
        given = application.args(setting) | {"lora_root": None, "resume_window_s": setting.window_s}
        args = ServerArgs(**given, api_key_digests=FRONT_ARGS.api_key_digests)
        self.service = self.own = self.process.call(lambda: self._own(args))
        self.engine = self.own.service
        self.http_app = http_app_of(args, self.service, METRICS, keys_of(args), None, Member(cluster, "llama"), FRONT)

    @property
    def models(self) -> list[ServedModel]:
        return [self.own]

    def _own(self, args: ServerArgs) -> OwnEngine:
        service = LlamaService(args, self.groups, on_step=METRICS.on_step)
        return OwnEngine(service, args, METRICS.on_end)

    async def ready(self) -> None:
        await self.process.run(self.own.start())

    async def drain(self) -> None:
        await self.process.run(self._end())

    async def _end(self) -> None:
        await self.own.drain()
        await self.own.stop()

    async def stop(self) -> None:
        await self.own.stop()
