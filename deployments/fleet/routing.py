"""In which order a front asks a model's engines to compute a request: the policies, by name.

Pure functions of what engines have told. Knows nothing of connections. `IngressArgs.routing` names one of POLICIES.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

TIE: Final = 32  # costs that differ by less are equal: a template's first tokens bind no prompt to an engine


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one engine and one prompt. load: sequences that run or wait there, in full batches. max_step_tokens: that a step of it
    computes. num_known: tokens of the prompt that its cache has."""

    engine: str
    is_ready: bool
    load: float
    max_step_tokens: int
    num_known: int = 0


# The facts of the engines that could compute a prompt, and a hash of it -> the same facts, the best engine first.
Policy = Callable[[Sequence[Facts], bytes], list[Facts]]


def by_cost(engines: Sequence[Facts], prompt: bytes) -> list[Facts]:
    """Ready engines, the cheapest one first, then the others. The cost, in tokens: those of the prompt that the engine does not
    know, and as many as a step computes for the sequences that fill a batch.

    The prompt's hash orders engines of equal costs: so requests that share nothing spread over idle engines, and equal prompts
    meet, by whichever front they come."""
    return _ordered(engines, prompt, lambda engine: engine.load * engine.max_step_tokens - engine.num_known)


def by_load(engines: Sequence[Facts], prompt: bytes) -> list[Facts]:
    """Ready engines, the one with the least load first, whatever their caches hold."""
    return _ordered(engines, prompt, lambda engine: engine.load * engine.max_step_tokens)


POLICIES: Final[Mapping[str, Policy]] = {"cost": by_cost, "load": by_load}


def _ordered(engines: Sequence[Facts], prompt: bytes, cost: Callable[[Facts], float]) -> list[Facts]:
    costs = {engine.engine: cost(engine) for engine in engines}
    least = min(costs.values(), default=0.0)

    def key(engine: Facts) -> tuple[bool, float, bytes]:
        is_tie = costs[engine.engine] < least + TIE
        return not engine.is_ready, least if is_tie else costs[engine.engine], _rank(prompt, engine) if is_tie else b""

    return sorted(engines, key=key)


def _rank(prompt: bytes, engine: Facts) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998)."""
    return blake2b(prompt + engine.engine.encode(), digest_size=8).digest()
