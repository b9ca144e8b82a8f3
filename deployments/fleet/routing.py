"""In which order a front asks a model's engines to compute a request.

Pure functions of what engines have told. Knows nothing of connections.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Protocol, TypeVar

from deployments.fleet.affinity import PromptPrefixes

TIE: Final = 32  # costs that differ by less are equal: a template's first tokens bind no prompt to an engine


class Candidate(Protocol):
    """An engine, as routing sees it."""

    @property
    def engine_id(self) -> str: ...
    @property
    def is_ready(self) -> bool: ...
    def cost(self, prefixes: PromptPrefixes) -> float:
        """Of a prompt there, in tokens to be computed."""


Engine = TypeVar("Engine", bound=Candidate)


def by_cost(engines: Sequence[Engine], prefixes: PromptPrefixes) -> Sequence[Engine]:
    """Ready engines, the cheapest one first, then the others. The prompt's hash orders those of equal costs: so requests that
    share nothing spread over idle engines, and equal prompts meet, by whichever front they come."""
    if len(engines) < 2:
        return engines
    costs = {engine: engine.cost(prefixes) for engine in engines}
    least = min(costs.values())

    def key(engine: Engine) -> tuple[bool, float, bytes]:
        is_tie = costs[engine] < least + TIE
        rank = _rank(prefixes.name, engine.engine_id) if is_tie else b""
        return not engine.is_ready, least if is_tie else costs[engine], rank

    return sorted(engines, key=key)


def _rank(prompt: bytes, engine_id: str) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998)."""
    return blake2b(prompt + engine_id.encode(), digest_size=8).digest()
