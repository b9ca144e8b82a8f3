"""The scheduler's rules under operations from hypothesis and from a random generator; and faults that the rules must detect."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from llama_core.errors import RankFailure
from llama_core.scheduling.admission import Admission
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.fair_queue import WaitingQueue
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.speculation import Speculation
from tests.fuzz import scheduler
from tests.fuzz.scheduler_rules import BLOCK_SIZE, MAX_LENGTH, OWNERS, PREFIXES, Bench, World
from tests.support.fake_ranks import arbitrary, repetitive

_worlds = st.builds(
    World,
    num_blocks=st.integers(MAX_LENGTH // BLOCK_SIZE, 20),
    slots=st.integers(1, 5),
    extra_tokens=st.integers(0, 12),
    depth=st.integers(1, 3),
    max_drafts=st.sampled_from([0, 4, 8]),
    prefix_caching=st.booleans(),
    max_waiting=st.none() | st.integers(1, 8),
    max_waiting_tokens=st.none() | st.integers(20, 200),
    model=st.sampled_from([arbitrary, repetitive]),
    deferrals=st.sampled_from([0.0, 0.2, 0.6]),
)


class Machine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(world=_worlds)
    def start(self, world: World) -> None:
        self.bench = Bench(world)

    @rule(
        target=requests,
        prefix=st.integers(0, len(PREFIXES) - 1),
        own=st.lists(st.integers(3, 6), min_size=1, max_size=9),
        max_new=st.integers(0, 20),
        n=st.integers(1, 4),
        owner=st.sampled_from(OWNERS),
        priority=st.integers(0, 2),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
        seed=st.integers(0, 2),
    )
    def add(
        self,
        prefix: int,
        own: list[int],
        max_new: int,
        n: int,
        owner: str,
        priority: int,
        flags: tuple[bool, bool, bool, bool],
        seed: int,
    ) -> list[Sequence]:
        ignore_eos, prompt_logprobs, oracle, has_grammar = flags
        return self.bench.add(
            prefix, own, max_new, n=n, owner=owner, priority=priority, ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs, seed=seed, oracle=oracle, has_grammar=has_grammar,
        )  # fmt: skip

    @rule(samples=requests, reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]))
    def leave(self, samples: list[Sequence], reason: FinishReason) -> None:
        for seq in samples:
            self.bench.finish(seq, reason)

    @rule()
    def schedule(self) -> None:
        self.bench.schedule()

    @rule(spoilt=st.none() | st.integers(0, 30), stops=st.booleans(), sends_first=st.booleans())
    def commit(self, spoilt: int | None, stops: bool, sends_first: bool) -> None:
        self.bench.commit(spoilt=spoilt, stops=stops, sends_first=sends_first)

    @rule(num_steps=st.integers(2, 8))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while self.bench.schedule():
                pass
            self.bench.commit()

    @rule(unsent=st.booleans(), raises=st.booleans(), num_blocks=st.none() | st.integers(MAX_LENGTH // BLOCK_SIZE, 20))
    def fail(self, unsent: bool, raises: bool, num_blocks: int | None) -> None:
        self.bench.fail(unsent=unsent, raises=raises, num_blocks=num_blocks)

    @rule(num_tokens=st.sampled_from([1, 3, 100]))
    def limit_prompts(self, num_tokens: int) -> None:
        self.bench.limit_prompts(num_tokens)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.drain()


TestRules = Machine.TestCase
TestRules.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("seed", [2, None], ids=["a known seed", "a random seed"])
def test_ten_thousand_random_operations_break_no_rule(seed: int | None) -> None:
    outcome = scheduler.run(10_000, seed=Random().randrange(10**6) if seed is None else seed)
    assert outcome.findings == [] and outcome.cases == 10_000
    # The caches of a random seed may all be large enough that nothing is preempted.
    assert seed is None or all(outcome.extra[what] for what in ("preemptions", "prefix_hit_tokens", "deferrals"))


# The rules must detect each of these injected faults.


def _leak(pool: BlockPool, blocks: Any) -> None:
    _release(pool, blocks[1:])


def _share(pool: BlockPool, num_blocks: int, **asked: Any) -> list[int] | None:
    blocks = _allocate(pool, num_blocks, **asked)
    return [*blocks[:-1], 0] if blocks else blocks


def _miscount(queue: WaitingQueue, seq: Sequence) -> None:
    queue._preempted[seq] = None
    queue._length += 2


def _lose(self: Scheduler, epoch: int, failure: RankFailure | None = None) -> Sequence | None:
    harmful = _restart(self, epoch, failure)
    if self.num_waiting > 1:
        self.admission.waiting.remove(self.admission.waiting.first())
    return harmful


def _forget_drafts(self: Speculation, *given: Any) -> int:
    return min(_verify(self, *given) + 1, len(given[3]) - 1)


def _go_on(seq: Sequence) -> None:
    scheduled = seq.scheduled
    _defer(seq)
    seq.scheduled = scheduled


def _forget_deferrals(admission: Admission, seq: Sequence) -> None:
    inflight, seq.inflight = seq.inflight, 0
    _release_behind_window(admission, seq)
    seq.inflight = inflight


def _newest_first(queue: WaitingQueue) -> Sequence:
    return list(queue)[-1]


_release, _allocate = BlockPool.release, BlockPool.try_allocate
_restart, _verify = Scheduler.restart, Speculation.verify
_defer, _release_behind_window = Sequence.defer, Admission.release_behind_window


@pytest.mark.parametrize(
    ("kind", "name", "fault"),
    [
        (BlockPool, "release", _leak),
        (BlockPool, "try_allocate", _share),
        (WaitingQueue, "add_first", _miscount),
        (WaitingQueue, "first", _newest_first),
        (Scheduler, "restart", _lose),
        (Speculation, "verify", _forget_drafts),
        (Sequence, "defer", _go_on),
        (Admission, "release_behind_window", _forget_deferrals),
    ],
    ids=[
        "a leak",
        "two owners",
        "a miscount",
        "one is passed over",
        "a request is lost",
        "a wrong draft",
        "a deferred sample is left out",
        "a deferred sample's window is released",
    ],
)
def test_a_scheduler_with_an_injected_bug_breaks_a_rule(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(kind, name, fault)
    assert scheduler.run(4000, seed=1).num_findings
