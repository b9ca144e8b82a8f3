"""The resources of a replica and its ranks, and whether a cluster could ever provide them. Pure: makes no Ray call.

Bundle 0 of a placement group is the Serve replica's, bundle 1 + r is rank r's while there is room for all ranks.
Serve makes the group from these bundles (`placement_group_bundles`), so a replica's ranks come and go with it, and an
autoscaler sees a pending group.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

Bundle = dict[str, float]
Strategy = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
Device = Literal["cpu", "cuda"]

REPLICA_BUNDLE: Final = 0
FIRST_RANK_BUNDLE: Final = 1
REPLICA_CPUS: Final = 0.1  # with CPU ranks; taken from rank 0's bundle, so that two ranks and a replica fit two cores
_EPSILON: Final = 1e-4  # Ray counts resources in units of 1/10,000


def rank_bundle_indices(world_size: int) -> list[int]:
    """Ray's indices of the bundles of ranks 0, 1, ... in a placement group with room for all of them."""
    return list(range(FIRST_RANK_BUNDLE, FIRST_RANK_BUNDLE + world_size))


def resolve_device(device: Literal["auto", "cpu", "cuda"], nodes: Sequence[Mapping[str, float]]) -> Device:
    """`auto` is cuda where any node has a GPU. Set "cuda" for a cluster whose GPU nodes start on demand."""
    if device != "auto":
        return device
    return "cuda" if any(node.get("GPU", 0) > 0 for node in nodes) else "cpu"


def fair_cpus_per_rank(
    device: Device, world_size: int, nodes: Sequence[Mapping[str, float]], strategy: Strategy = "PACK"
) -> int:
    """The CPUs of a rank where `cpus_per_rank` is not set: a node's CPUs, shared by the ranks that the strategy puts there.

    At least one. One with CUDA, where the GPU computes, and where the nodes are unknown.
    """
    cpus = [count for node in nodes if (count := node.get("CPU", 0))]
    if device == "cuda" or not cpus:
        return 1
    if "SPREAD" in strategy:
        return max(1, int(min(cpus)) // -(-world_size // len(cpus)))
    return max(1, int(max(cpus)) // world_size)


def group_bundles(world_size: int, device: Device, *, cpus_per_rank: float = 1) -> list[Bundle]:
    """Bundles of one replica with `world_size` ranks. The first is for the replica's own actor.

    With CPU ranks the replica asks for a share of a CPU and for nothing else. So it lands on a node where ranks may land,
    never on a head without CPUs, and a node type that declares only CPUs matches.
    """
    if world_size < 1:
        raise ValueError("world_size must be at least 1")
    if cpus_per_rank <= 0:
        raise ValueError("cpus_per_rank must be greater than 0")
    if device == "cuda":
        return [{"CPU": 1}, *({"CPU": cpus_per_rank, "GPU": 1} for _ in range(world_size))]
    share = min(REPLICA_CPUS, cpus_per_rank / 2)
    return [{"CPU": share}, {"CPU": cpus_per_rank - share}, *({"CPU": cpus_per_rank} for _ in range(world_size - 1))]


def compute_threads(bundles: Sequence[Mapping[str, float]], index: int) -> int:
    """Threads of the rank in bundle `index`: the whole CPUs of `cpus_per_rank`, the same number for every rank, and at least
    one. Rank 0's bundle has given the replica a share.
    """
    cpus = bundles[index].get("CPU", 1)
    if index == FIRST_RANK_BUNDLE and not bundles[index].get("GPU"):
        cpus += min(REPLICA_CPUS, bundles[REPLICA_BUNDLE].get("CPU", 0))
    return max(1, int(cpus + _EPSILON))


def actor_options(bundle: Mapping[str, float]) -> dict[str, object]:
    """A bundle as the keyword arguments of an actor's `.options(...)`: all of it, with CPUs above 1 rounded down,
    because Ray refuses fractions of those.
    """
    cpus = bundle.get("CPU", 0)
    custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    options: dict[str, object] = {"num_cpus": int(cpus) if cpus > 1 else cpus, "num_gpus": bundle.get("GPU", 0)}
    if bundle.get("memory"):
        options["memory"] = bundle["memory"]
    if custom:
        options["resources"] = custom
    return options


def shortage(
    bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]], strategy: Strategy = "PACK"
) -> str | None:
    """Why these bundles could never be placed on nodes with these total resources; None if they might.

    A necessary condition, not a sufficient one: sums over the cluster, the largest bundle against the largest node,
    and for STRICT_PACK the sum against the largest node. Resources in use are not subtracted.
    """
    need = _sum(bundles)
    have = _sum(nodes)
    lacking = [name for name in sorted(need) if need[name] > have.get(name, 0) + _EPSILON]
    if lacking:
        wants = ", ".join(_amount(name, need[name]) for name in lacking)
        return f"needs {wants}, the cluster has {', '.join(_amount(name, have.get(name, 0)) for name in lacking)}"
    if strategy == "STRICT_PACK" and not any(_fits(need, node) for node in nodes):
        return f"needs {_amounts(need)} on one node, the largest node has {_largest(need, nodes)}"
    for bundle in bundles:
        if not any(_fits(bundle, node) for node in nodes):
            return f"needs {_amounts(bundle)} on one node for a rank, the largest node has {_largest(bundle, nodes)}"
    if strategy == "STRICT_SPREAD" and len(bundles) > len(nodes):
        return f"needs {len(bundles)} nodes, the cluster has {len(nodes)}"
    return None


def surge_percent(new: Sequence[Bundle], running: Sequence[Sequence[Bundle]], free: Mapping[str, float]) -> int:
    """The percentage of replicas that an update starts before it ends old ones: as many as fit into `free`. 0: one ends first.

    `running` has the groups of old replicas. Where one of these is smaller than a new one, all new ones must fit: Serve ends
    the last old one when all new ones run, so the last new one gets no more room than the old ones before had.
    """
    need, count = _sum(new), max(1, len(running))
    fitting = min(int((free.get(name, 0) + _EPSILON) / amount) for name, amount in need.items())
    if fitting >= count:
        return 100
    is_larger = not all(_fits(need, _sum(group)) for group in running)
    return 0 if is_larger or not fitting else max(1, 100 * fitting // count)


def _sum(parts: Sequence[Mapping[str, float]]) -> Bundle:
    total: Bundle = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0) + amount
    return total


def _fits(need: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(amount <= node.get(name, 0) + _EPSILON for name, amount in need.items())


def _largest(need: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    """The resources of the node that has the largest share of its scarcest needed resource."""
    best = max(
        nodes, default={}, key=lambda node: min((node.get(name, 0) / n for name, n in need.items() if n), default=0)
    )
    return _amounts({name: best.get(name, 0) for name in need})


def _amounts(amounts: Mapping[str, float]) -> str:
    return " and ".join(_amount(name, amounts[name]) for name in sorted(amounts))


def _amount(name: str, amount: float) -> str:
    if name == "memory":
        return f"{amount / 2**20:.0f} MiB of memory"
    plural = "s" if name in ("CPU", "GPU") and amount != 1 else ""
    return f"{amount:g} {name}{plural}"
