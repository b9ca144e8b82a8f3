"""Which GPUs a rank's process sees, and which of them it uses: with GPUs that Ray counts and no process opens."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cluster.driver import standby
from cluster.driver.placement import group_bundles
from cluster.driver.rank_actors import OPTIONS, RankActors
from cluster.driver.standby import StandbyPool
from cluster.wire.process_end import ProcessIdentity
from cluster.wire.rank_runner import RankRunner, RendezvousSpec
from cluster.wire.rank_status import RankIdentity, Share
from llama_core.config import EngineConfig
from llama_core.rank_report import RankReport
from tests.cluster.conftest import LIMITS
from tests.support.fake_runner import CONFIG, FakeFactory, FakeRunner, StandbyWithoutTorch
from tests.support.waiting import until_true


@dataclass(frozen=True)
class ReportsGpus:
    """A runner factory whose report has the visible GPUs and the index of the rank's own as its device."""

    def __call__(
        self, config: EngineConfig, rendezvous: RendezvousSpec, on_progress: Callable[[int, int], None]
    ) -> RankRunner:
        runner = FakeRunner(FakeFactory(), rendezvous)
        seen = f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {rendezvous.device_index}"
        runner.report = RankReport(device=seen, dtype="float32", weight_bytes=1000, load_seconds=0.25)
        return runner


@pytest.fixture
def gpu_placement(ray_cluster: None) -> Iterator[PlacementGroup]:
    group = placement_group(group_bundles(2, "cuda"), strategy="STRICT_PACK")
    ray.get(group.ready(), timeout=120)
    yield group
    remove_placement_group(group)


async def test_ranks_see_all_gpus_of_their_group_in_one_order_and_use_their_own(
    gpu_placement: PlacementGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the processes that replace them, which hold no resources and get no GPU from Ray."""
    monkeypatch.setattr(standby, "START_DELAY_S", 0.0)
    monkeypatch.setattr("cluster.driver.rank_actors.RankActor", ray.remote(**OPTIONS)(StandbyWithoutTorch))
    pool = StandbyPool(gpu_placement, LIMITS, enabled=True, runner_factory=ReportsGpus())
    first = pool.open_group(CONFIG, 0, None)
    info = await first.start()
    own = [identity.share.gpu_ids for identity in info.identities]
    seen = ",".join(gpu for (gpu,) in own)
    assert sorted(own) == [("0",), ("1",)]
    expected = [f"{seen} 0", f"{seen} 1"]
    assert [report.device for report in info.ranks] == expected
    pool.prepare_standby(info)
    await until_true("the standby processes are ready", lambda: pool.num_standby == 2)
    await first.stop()
    second = pool.open_group(CONFIG, 1, info.num_blocks)
    info_of_second = await second.start()
    assert [identity.share.gpu_ids for identity in info_of_second.identities] == own
    assert [report.device for report in info_of_second.ranks] == expected
    await second.stop()
    await pool.stop()


def test_gpus_of_another_node_and_other_parts_of_a_gpu_are_not_shown() -> None:
    ranks = RankActors(None, None, ())  # type: ignore[arg-type]
    places = [("node a", ("GPU-5",)), ("node b", ("0",)), ("node a", ("GPU-1",)), ("node c", ())]
    for rank in (2, 0, 1, 3):  # answers come in any order
        node, gpus = places[rank]
        ranks.identities[rank] = RankIdentity(rank, ProcessIdentity(1, 1), node, "192.0.2.7", Share(1, gpus))
    assert ranks.visible_gpus(0) == ranks.visible_gpus(2) == ("GPU-5", "GPU-1")
    assert ranks.visible_gpus(1) == ("0",) and ranks.visible_gpus(3) == ()

    for rank, gpu in enumerate(("MIG-4f", "MIG-a0")):
        ranks.identities[rank] = RankIdentity(rank, ProcessIdentity(1, 1), "node", "192.0.2.7", Share(1, (gpu,)))
    assert [ranks.visible_gpus(rank) for rank in range(2)] == [("MIG-4f",), ("MIG-a0",)]
