"""The Ray actor of a rank: a thin shell around `cluster.rank.rank_process`, which is imported in the actor's process only.

The driver imports this module to create the actor, so it must not import what only a rank runs.
"""

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import ray

from cluster.wire.rank_runner import Keys, LoadOrder
from cluster.wire.rank_status import RankIdentity, RankStatus, Share
from cluster.wire.transport import Invitation
from llama_core.rank_report import RankReport
from llama_core.remote.model_files import RemoteModel

_RANK_PROCESS: Final = "cluster.rank.rank_process:RankProcess"


class RankControl(Protocol):
    """The driver's calls to a rank, in the order of the calls; `preload` is first, and for a standby process only."""

    def preload(self, share: Share) -> bool: ...
    def identify(self, epoch: int, share: Share) -> RankIdentity: ...
    def fetch(self, downloads: Sequence[RemoteModel]) -> None:
        """Have the files of these models on the rank's node, of whose ranks one downloads them."""

    def connect(self, invitation: Invitation, timeout_s: float) -> None: ...
    def load(self, order: LoadOrder, visible_gpus: Sequence[str], call_store: Callable[..., Any] | None) -> RankReport:
        """visible_gpus: ids of the GPUs that the process is to see, its own included, in the order of all ranks of its node."""

    def prepare(self, num_blocks: int) -> None: ...
    def serve(self) -> None: ...
    def status(self) -> RankStatus:
        """At any time, from another thread."""


class RankWorker:
    """`RankControl` by Ray calls. They run in order on the actor's one default thread; `status` and `store` share another."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        context = ray.get_runtime_context()
        node_ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        rank_process = pkgutil.resolve_name(_RANK_PROCESS)
        self._keys = Keys()
        self._process: RankControl = rank_process(rank, world_size, context.get_node_id(), node_ip)

    def preload(self, share: Share) -> bool:
        return self._process.preload(share)

    def identify(self, epoch: int, num_threads: int) -> RankIdentity:
        gpu_ids = tuple(str(index) for index in ray.get_gpu_ids())
        return self._process.identify(epoch, Share(num_threads, gpu_ids))

    def fetch(self, downloads: Sequence[RemoteModel]) -> None:
        self._process.fetch(downloads)

    def connect(self, invitation: Invitation, timeout_s: float) -> None:
        self._process.connect(invitation, timeout_s)

    def load(self, order: LoadOrder, visible_gpus: Sequence[str], keeper: Any | None) -> RankReport:
        """keeper: the actor whose `store` the ranks meet in."""

        def call_store(method: str, *arguments: Any) -> Any:
            assert keeper is not None
            try:
                return ray.get(keeper.store.remote(method, *arguments), timeout=order.timeout_s)
            except ray.exceptions.RayError as error:  # as its own it would say that this rank has died
                raise ConnectionError(f"rank 0 does not answer ({type(error).__name__})") from None

        return self._process.load(order, visible_gpus, None if keeper is None else call_store)

    def prepare(self, num_blocks: int) -> None:
        self._process.prepare(num_blocks)

    def serve(self) -> None:
        self._process.serve()

    @ray.method(concurrency_group="control")
    def store(self, method: str, *arguments: Any) -> Any:
        """A method of `Keys`. Callers have Ray's token, if Ray has one."""
        return getattr(self._keys, method)(*arguments)

    @ray.method(concurrency_group="control")
    def status(self) -> RankStatus:
        return self._process.status()
