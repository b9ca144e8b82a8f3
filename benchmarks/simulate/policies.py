"""Policies to compare with: each orders the engines that could compute a prompt, as those of `deployments.fleet.routing` do."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Final

from deployments.fleet.routing import Facts, Policy


def round_robin() -> Policy:
    turns = count()

    def policy(engines: Sequence[Facts], prompt: bytes) -> list[Facts]:
        ordered = sorted(engines, key=lambda engine: engine.engine)
        turn = next(turns) % len(ordered)
        return ordered[turn:] + ordered[:turn]

    return policy


def power_of_two() -> Policy:
    """Of two engines by chance, the one with fewer sequences."""
    draw = random.Random(1)

    def policy(engines: Sequence[Facts], prompt: bytes) -> list[Facts]:
        ordered = draw.sample(sorted(engines, key=lambda engine: engine.engine), len(engines))
        return sorted(ordered[:2], key=lambda engine: engine.load) + ordered[2:]

    return policy


def least_loaded() -> Policy:
    return lambda engines, prompt: sorted(engines, key=lambda engine: (engine.load, engine.engine))


def longest_prefix() -> Policy:
    return lambda engines, prompt: sorted(engines, key=lambda e: (-e.num_known, e.load, e.engine))


COMPARISONS: Final[Mapping[str, Callable[[], Policy]]] = {
    "round_robin": round_robin,
    "power_of_two": power_of_two,
    "least_loaded": least_loaded,
    "longest_prefix": longest_prefix,
}
