"""In which order a front asks a model's engines to compute a request: the policies, by name.

Pure functions of what engines have told. Knows nothing of connections. `IngressArgs.routing` names one of POLICIES.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from llama_core.scheduling.step_costs import CostModel

# Engines whose costs differ by less are equal. Half the base time of the fastest engine's step comes on top, and a share of
# what the prompt costs: step costs are measured, and the luckiest measurement would get every request of an idle fleet.
TIE_MS: Final = 4.0
TIE_SHARE: Final = 0.1
# How many other requests a prompt's computation, or an adapter's load, delays on average. Found by `python -m benchmarks
# simulate`: with 1, groups of equal prompts are computed several times; 8 is no better.
DELAYED: Final = 4.0
# Weight of the time that a new row adds to the rows that run, relative to the wait for the first token.
ROWS: Final = 0.7
NOMINAL: Final = CostModel(20.0, 0.5, 1.0, 50.0, 64.0)  # until an engine has told its costs


class Prompt(NamedTuple):
    """name: a hash of the prompt up to its first block that no engine knows. number: of the front's requests, in turn."""

    name: bytes
    number: int = 0


class Facts(NamedTuple):
    """Of one engine and one prompt.

    running, waiting: sequences there, with and without a slot; queued_tokens: of their prompts, to be computed. All of them
    include what is on its way. num_known, num_new: tokens of the prompt that the cache has, and that are left to compute.
    """

    engine: str
    is_ready: bool
    running: int
    waiting: int
    slots: int
    queued_tokens: int
    num_new: int
    num_known: int = 0
    step_tokens: int = 512
    num_blocks: int = 1_000_000
    free_blocks: int = 1_000_000
    block_size: int = 16
    loads_adapter: bool = False
    costs: CostModel = NOMINAL

    @property
    def num_sequences(self) -> int:
        return self.running + self.waiting

    @property
    def step_ms(self) -> float:
        """Of a step with the decodes alone."""
        return self.costs.base_ms + self.costs.row_ms * min(self.running + self.waiting, self.slots)

    @property
    def first_token_ms(self) -> float:
        """From now to the prompt's first token: the prompts before it and its own in steps beside the decodes, then turns for
        slots and blocks, which come free one sequence after the other."""
        costs, slots, num_tokens = self.costs, self.slots, self.queued_tokens + self.num_new
        total_ms = num_tokens * costs.token_ms + -(-num_tokens // self.step_tokens) * self.step_ms
        lacking = self.running + self.waiting + 1.0 - slots
        blocks = num_tokens / self.block_size - self.free_blocks
        if blocks > 0 and self.running:
            lacking = max(lacking, self.running * blocks / max(1, self.num_blocks - self.free_blocks))
        if lacking > 0:
            total_ms += lacking * costs.output_tokens * (costs.base_ms + costs.row_ms * slots) / slots
        return total_ms + costs.adapter_ms if self.loads_adapter else total_ms

    @property
    def delay_ms(self) -> float:
        """By how much the request delays others: its prompt those that come after it, its row each that runs."""
        costs = self.costs
        own_ms = self.num_new * costs.token_ms + self.loads_adapter * costs.adapter_ms
        return DELAYED * own_ms + ROWS * costs.row_ms * costs.output_tokens * self.num_sequences


# The facts of the engines that could compute a prompt -> the same facts, the best engine first.
Policy = Callable[[Sequence[Facts], Prompt], list[Facts]]


def by_time(engines: Sequence[Facts], prompt: Prompt) -> list[Facts]:
    """Ready engines, the one with the earliest first token and the least delay to others first; then the others.

    The prompt's name orders engines of about equal costs: so requests that share nothing spread over idle engines, and equal
    prompts meet, by whichever front they come."""
    own_ms = (1 + DELAYED) * min([engine.num_new * engine.costs.token_ms for engine in engines], default=0.0)
    tie_ms = TIE_MS + min([engine.costs.base_ms for engine in engines], default=0.0) / 2 + TIE_SHARE * own_ms
    return _ordered(engines, prompt, lambda engine: engine.first_token_ms + engine.delay_ms, tie_ms)


def round_robin(engines: Sequence[Facts], prompt: Prompt) -> list[Facts]:
    """Each engine in turn."""
    known = sorted(engines, key=lambda engine: (not engine.is_ready, engine.engine))
    num_ready = sum(engine.is_ready for engine in known)
    first = prompt.number % max(1, num_ready)
    return [*known[first:num_ready], *known[:first], *known[num_ready:]]


def power_of_two(engines: Sequence[Facts], prompt: Prompt) -> list[Facts]:
    """Of two chosen at random, the one with fewer sequences; then the others."""
    ranks = sorted(
        engines, key=lambda engine: (not engine.is_ready, _rank(b"%d" % prompt.number + prompt.name, engine))
    )
    two = sorted(ranks[:2], key=lambda engine: (not engine.is_ready, engine.num_sequences))
    return [*two, *ranks[2:]]


def least_loaded(engines: Sequence[Facts], prompt: Prompt) -> list[Facts]:
    """The one whose slots are taken the least."""
    return _ordered(engines, prompt, lambda engine: engine.num_sequences / engine.slots)


def longest_prefix(engines: Sequence[Facts], prompt: Prompt) -> list[Facts]:
    """The one that knows most of the prompt, whatever its load."""
    return _ordered(engines, prompt, lambda engine: -engine.num_known)


POLICIES: Final[Mapping[str, Policy]] = {
    "expected_time": by_time,
    "least_loaded": least_loaded,
    "longest_prefix": longest_prefix,
    "power_of_two": power_of_two,
    "round_robin": round_robin,
}


def _ordered(
    engines: Sequence[Facts], prompt: Prompt, cost: Callable[[Facts], float], tie: float = 1e-9
) -> list[Facts]:
    """tie: costs that exceed the least one by less count as equal."""
    costs = [cost(engine) for engine in engines]
    least = min([own for own, engine in zip(costs, engines, strict=True) if engine.is_ready], default=0.0)
    keys = []
    for own, engine in zip(costs, engines, strict=True):
        is_tied = own < least + tie
        keys.append((not engine.is_ready, least if is_tied else own, _rank(prompt.name, engine) if is_tied else b""))
    return [engines[place] for place in sorted(range(len(engines)), key=keys.__getitem__)]


def _rank(name: bytes, engine: Facts) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998)."""
    return blake2b(name + engine.engine.encode(), digest_size=8).digest()
