"""In which order a front asks a model's engines to compute a request.

Pure functions of what engines have told. Knows nothing of connections.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final, Protocol, TypeVar

TIE: Final = 32  # costs that differ by less are equal: a template's first tokens bind no prompt to an engine


class Candidate(Protocol):
    """An engine, as routing sees it."""

    @property
    def engine_id(self) -> str: ...
    @property
    def is_ready(self) -> bool: ...


Engine = TypeVar("Engine", bound=Candidate)


def by_cost(costs: Mapping[Engine, float], prompt: bytes) -> list[Engine]:
    """Ready engines, the cheapest one first, then the others. costs: in tokens to be computed. prompt: a hash of it, which
    orders those of equal costs: so requests that share nothing spread over idle engines, and equal prompts meet, by whichever
    front they come."""
    if len(costs) < 2:
        return list(costs)
    least = min(costs.values())

    def key(engine: Engine) -> tuple[bool, float, bytes]:
        is_tie = costs[engine] < least + TIE
        return not engine.is_ready, least if is_tie else costs[engine], _rank(prompt, engine) if is_tie else b""

    return sorted(costs, key=key)


def _rank(prompt: bytes, engine: Candidate) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998)."""
    return blake2b(prompt + engine.engine_id.encode(), digest_size=8).digest()
