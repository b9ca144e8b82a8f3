"""The resources of a replica and its ranks, and the description of a shortage."""

from typing import Any

import pytest

from cluster.driver.placement import (
    Device,
    Strategy,
    actor_options,
    compute_threads,
    fair_cpus_per_rank,
    group_bundles,
    resolve_device,
    shortage,
    surge_percent,
)

GPU_NODE = {"CPU": 16.0, "GPU": 4.0, "memory": 1e11}
LAPTOP = {"CPU": 2.0, "memory": 8 * 2**30}


def test_a_rank_has_its_cores_or_a_gpu_and_a_core() -> None:
    assert group_bundles(2, "cuda") == [{"CPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]
    assert group_bundles(2, "cpu", cpus_per_rank=4)[2] == {"CPU": 4}
    for world_size in (0, -1):
        with pytest.raises(ValueError, match="world_size"):
            group_bundles(world_size, "cpu")
    with pytest.raises(ValueError, match="cpus_per_rank"):
        group_bundles(1, "cpu", cpus_per_rank=0)


@pytest.mark.parametrize(
    ("bundles", "nodes", "strategy", "message"),
    [
        (group_bundles(2, "cpu"), [LAPTOP], "STRICT_PACK", None),
        (group_bundles(8, "cuda"), [GPU_NODE], "PACK", "needs 8 GPUs, the cluster has 4 GPUs"),
        (group_bundles(4, "cuda"), [LAPTOP], "PACK", "needs 5 CPUs, 4 GPUs, the cluster has 2 CPUs, 0 GPUs"),
        ([{"CPU": 1}], [], "PACK", "needs 1 CPU, the cluster has 0 CPUs"),
        (group_bundles(8, "cuda"), [GPU_NODE] * 2, "PACK", None),
        (group_bundles(8, "cuda"), [GPU_NODE] * 2, "STRICT_PACK",
         "needs 9 CPUs and 8 GPUs on one node, the largest node has 16 CPUs and 4 GPUs"),
        (group_bundles(2, "cpu", cpus_per_rank=4), [{"CPU": 3, "memory": 2**30}] * 4, "PACK",
         "needs 3.9 CPUs on one node for a rank, the largest node has 3 CPUs"),
        (group_bundles(2, "cuda"), [GPU_NODE] * 2, "STRICT_SPREAD", "needs 3 nodes, the cluster has 2"),
    ],
)  # fmt: skip
def test_what_a_cluster_lacks_is_named(bundles: Any, nodes: Any, strategy: Strategy, message: str | None) -> None:
    assert shortage(bundles, nodes, strategy) == message


def test_an_actor_takes_the_whole_bundle_but_whole_cpus_or_a_fraction_of_one() -> None:
    assert [actor_options({"CPU": cpus})["num_cpus"] for cpus in (0.1, 0.9, 1, 3.9, 4)] == [0.1, 0.9, 1, 3, 4]
    options = actor_options({"CPU": 2, "GPU": 1, "memory": 5, "A100": 1})
    assert options == {"num_cpus": 2, "num_gpus": 1, "memory": 5, "resources": {"A100": 1}}


def test_a_cpu_replica_asks_for_cpus_only_so_that_it_lands_where_ranks_land() -> None:
    bundles = group_bundles(2, "cpu")
    assert all(set(bundle) == {"CPU"} and bundle["CPU"] > 0 for bundle in bundles)
    assert shortage(bundles, [{"CPU": 2.0}]) is None, "a node type that declares CPUs only matches"
    head = {"CPU": 0.0, "memory": 8 * 2**30}
    assert shortage(bundles[:1], [head]) == "needs 0.1 CPUs, the cluster has 0 CPUs"


@pytest.mark.parametrize(
    ("cpus_per_rank", "threads"),
    [(1, 1), (4, 4), (2.5, 2), (1.9, 1), (1.95, 1), (0.95, 1), (0.5, 1), (0.1, 1)],
)
def test_rank_0_lends_the_replica_a_share_and_keeps_its_threads(cpus_per_rank: float, threads: int) -> None:
    bundles = group_bundles(2, "cpu", cpus_per_rank=cpus_per_rank)
    assert sum(bundle["CPU"] for bundle in bundles) == pytest.approx(2 * cpus_per_rank)
    assert [compute_threads(bundles, index) for index in (1, 2)] == [threads, threads]


@pytest.mark.parametrize(
    ("device", "world_size", "cpus_of_nodes", "strategy", "cpus"),
    [
        ("cpu", 1, [8], "PACK", 8),
        ("cpu", 3, [8], "PACK", 2),
        ("cpu", 16, [8, 8], "PACK", 1),  # they do not fit on one node: Ray spreads them
        ("cpu", 2, [0, 4, 8], "STRICT_PACK", 4),
        ("cpu", 2, [4, 8], "SPREAD", 4),
        ("cpu", 3, [4, 8], "SPREAD", 2),
        ("cpu", 3, [0, 8, 8], "SPREAD", 4),
        ("cpu", 2, [], "PACK", 1),
        ("cpu", 2, [0], "PACK", 1),
        ("cuda", 2, [64], "PACK", 1),
    ],
)
def test_ranks_share_a_nodes_cores_by_default(
    device: Device, world_size: int, cpus_of_nodes: list[float], strategy: Strategy, cpus: int
) -> None:
    nodes = [{"CPU": cpus} for cpus in cpus_of_nodes]
    assert fair_cpus_per_rank(device, world_size, nodes, strategy) == cpus


def test_auto_is_cuda_where_a_node_has_a_gpu() -> None:
    assert resolve_device("auto", [LAPTOP, GPU_NODE]) == "cuda"
    assert resolve_device("auto", [LAPTOP]) == "cpu"
    assert resolve_device("cuda", [LAPTOP]) == "cuda"


@pytest.mark.parametrize(
    ("old_cpus", "num_running", "free", "percent"),
    [
        (1, 0, 2, 100),
        (1, 1, 0, 0),
        (1, 3, 4, 100),
        (1, 3, 1, 33),
        (1, 3, 2, 66),
        (2, 3, 2, 66),
        (0.5, 2, 2, 100),
        (0.5, 2, 1.4, 0),  # one fits, and the last would wait for ever
        (1, 150, 1, 1),
    ],
)
def test_an_update_starts_as_many_replicas_at_once_as_fit(
    old_cpus: float, num_running: int, free: float, percent: int
) -> None:
    old, new = group_bundles(2, "cpu", cpus_per_rank=old_cpus / 2), group_bundles(2, "cpu", cpus_per_rank=0.5)
    assert surge_percent(new, [old] * num_running, {"CPU": free}) == percent
    assert percent in (0, 1, 100) or -(-percent * num_running // 100) == int(free), "Serve rounds up"


def test_an_update_beside_one_smaller_replica_ends_one_first() -> None:
    small, new = group_bundles(2, "cpu", cpus_per_rank=0.25), group_bundles(2, "cpu", cpus_per_rank=0.5)
    assert surge_percent(new, [new, small, new], {"CPU": 2}) == 0
