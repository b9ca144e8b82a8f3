"""The scheduler under random requests, aborts, preemptions, pipelining and restarts: no block leaks and no token is lost."""

from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from llama_core.errors import InvalidParameter, QueueFull
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.prefix_cache import prefix_hash
from llama_core.scheduling.prompt_budget import TOKENS_A_PROMPT, TOKENS_ALONE
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepOutput
from tests.support.fake_ranks import EOS, FakeRanks, Model, Oracle, arbitrary, expected_output, repetitive
from tests.support.full_runs import examples


def make(
    num_blocks: int = 8,
    block_size: int = 4,
    slots: int = 3,
    budget: int = 6,
    max_waiting: int | None = None,
    max_drafts: int = 0,
    prefix_caching: bool = True,
    max_waiting_tokens: int | None = None,
) -> Scheduler:
    config = SchedulerConfig(
        slots, budget, frozenset({EOS}), max_waiting, max_drafts, prefix_caching, max_waiting_tokens=max_waiting_tokens
    )
    return Scheduler(config, BlockPool(num_blocks, block_size))


def sequence(prompt_len: int, max_new: int, owner: str = "", **params: object) -> Sequence:
    prompt = [3 + (prompt_len * 7 + i) % 50 for i in range(prompt_len)]
    return Sequence(prompt, SamplingParams(**params), prompt_len + max_new, owner=owner)  # type: ignore[arg-type]


def run_to_end(scheduler: Scheduler, ranks: FakeRanks, depth: int = 1) -> None:
    in_flight: deque[StepOutput] = deque()
    num_steps = 0
    for _ in range(100_000):
        batch = scheduler.schedule() if len(in_flight) < depth else None
        if batch is not None:
            assert num_steps == 0 or batch.step == num_steps + 1
            num_steps = batch.step
            in_flight.append(ranks.step(batch))
        elif in_flight:
            scheduler.commit(in_flight.popleft())
        else:
            assert not scheduler.has_work
            return
    raise AssertionError("no end: some sequence starves")


@pytest.mark.parametrize("stop_id", [EOS, 99])
def test_any_stop_id_ends_a_sequence(stop_id: int) -> None:
    ranks = FakeRanks(4, lambda tokens, seed: stop_id if len(tokens) == 6 else 50)
    scheduler = Scheduler(SchedulerConfig(4, 16, frozenset({EOS, 99})), BlockPool(16, 4))
    stopping, ignoring = sequence(4, 9), sequence(4, 9, ignore_eos=True)
    scheduler.add(stopping)
    scheduler.add(ignoring)
    while (batch := scheduler.schedule()) is not None:
        scheduler.commit(ranks.step(batch))
    assert stopping.output == [50, 50] and stopping.finish_reason is FinishReason.STOP
    assert ignoring.output == [50, 50, stop_id, *[50] * 6]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_sequence_gets_its_own_tokens_beside_any_other(depth: int) -> None:
    scheduler = make()
    sequences = [sequence(n, 9, ignore_eos=n % 2 == 0) for n in (1, 5, 13, 2, 8, 20, 3)]
    for seq in sequences:
        scheduler.add(seq)
    run_to_end(scheduler, FakeRanks(4), depth)
    for seq in sequences:
        assert seq.output == expected_output(seq)
    assert scheduler.pool.num_used == 0


@pytest.mark.parametrize(
    ("num_decodes", "num_prompts", "longest", "room"),
    [
        (0, 1, 4000, TOKENS_ALONE),  # no decode waits
        (0, 6, 4000, 6 * TOKENS_A_PROMPT),
        (0, 20, 4000, 2000),  # a full step
        (1, 1, 4000, TOKENS_A_PROMPT),
        (8, 1, 4000, TOKENS_A_PROMPT),  # one long prompt beside decodes comes in chunks
        (8, 3, 4000, TOKENS_A_PROMPT),
        (8, 4, 4000, 4 * TOKENS_A_PROMPT),  # a burst
        (8, 4, 300, 300),  # slow ranks
    ],
)
def test_prompts_take_little_of_a_step_beside_decodes_unless_they_come_in_a_burst(
    num_decodes: int, num_prompts: int, longest: int, room: int
) -> None:
    scheduler = make(num_blocks=10_000, slots=32, budget=2000)
    ranks = FakeRanks(4)
    running = [sequence(2 + i, 50, ignore_eos=True) for i in range(num_decodes)]
    for seq in running:
        scheduler.add(seq)
    while any(not seq.output for seq in running):
        scheduler.commit(ranks.step(scheduler.schedule()))  # type: ignore[arg-type]
    for i in range(num_prompts):
        scheduler.add(sequence(790 - i, 2, ignore_eos=True))
    scheduler.prompt_budget.limit(longest)
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.num_tokens == num_decodes + room


def test_a_prompt_longer_than_the_budget_is_prefilled_in_chunks_beside_a_running_decode() -> None:
    scheduler, ranks = make(num_blocks=16, budget=5), FakeRanks(4)
    short, long = sequence(2, 20, ignore_eos=True), sequence(14, 4, ignore_eos=True)
    scheduler.add(short)
    scheduler.commit(ranks.step(scheduler.schedule()))  # type: ignore[arg-type]
    scheduler.add(long)
    chunks = []
    while long.scheduled < 14:
        batch = scheduler.schedule()
        assert batch is not None
        assert batch.rows[0].slot == short.slot and batch.rows[0].length == 1, "the decode continues, before the prompt"
        assert batch.num_tokens <= 5
        chunks.append(batch.rows[1].length)
        scheduler.commit(ranks.step(batch))
    assert chunks == [4, 4, 4, 2]


def test_preemption_takes_the_youngest_and_costs_no_token() -> None:
    scheduler, ranks = make(num_blocks=5, block_size=2, slots=2, budget=8), FakeRanks(2)
    old, young = sequence(2, 8, ignore_eos=True), sequence(2, 8, ignore_eos=True)
    scheduler.add(old)
    scheduler.add(young)
    victims: list[Sequence] = []
    requeue = scheduler._preempt_youngest
    scheduler._preempt_youngest = lambda: victims.append(scheduler._running[-1]) or requeue()  # type: ignore[method-assign,func-returns-value]
    run_to_end(scheduler, ranks)
    assert len(victims) == scheduler.num_preemptions > 0
    assert set(victims) == {young}
    assert old.output == expected_output(old) and young.output == expected_output(young)


def test_abort_during_prefill_frees_every_block() -> None:
    scheduler, ranks = make(budget=4), FakeRanks(4)
    seq = sequence(12, 4)
    scheduler.add(seq)
    batch = scheduler.schedule()
    assert batch is not None and scheduler.pool.num_used == 3
    scheduler.finish(seq, FinishReason.ABORT)
    assert scheduler.pool.num_used == 0 and scheduler.num_running == 0
    assert scheduler.commit(ranks.step(batch)) == {}
    assert scheduler.schedule() is None and not scheduler.has_work


def test_a_full_queue_refuses_and_a_sequence_that_finds_a_slot_does_not_wait() -> None:
    scheduler = make(slots=1, max_waiting=1)
    scheduler.check_capacity([2] * 2)
    with pytest.raises(InvalidParameter, match=r"3 choices .* at most 2"):
        scheduler.check_capacity([2] * 3)
    scheduler.add(sequence(2, 2))
    scheduler.schedule()
    scheduler.check_capacity([2] * 1)
    scheduler.add(sequence(2, 2))
    with pytest.raises(QueueFull):
        scheduler.check_capacity([2] * 1)


def test_the_token_limit_counts_new_sequences_only_and_lets_one_of_any_length_wait() -> None:
    scheduler = make(slots=2, budget=20, max_waiting_tokens=10)
    for _ in range(2):
        scheduler.add(sequence(8, 2))
    scheduler.schedule()
    scheduler.check_capacity([12])
    scheduler.restart(1)
    scheduler.add(sequence(4, 2))
    scheduler.check_capacity([6])
    with pytest.raises(QueueFull, match="sequences of 4 tokens wait already, the limit is 10"):
        scheduler.check_capacity([7])


def test_an_owner_that_has_most_of_the_queue_is_refused_before_others_are() -> None:
    scheduler = make(slots=1, max_waiting=10)
    for owner in ["other", *["greedy"] * 8]:
        scheduler.add(sequence(2, 2, owner=owner))
    scheduler.schedule()
    scheduler.check_capacity(owner="other")
    with pytest.raises(QueueFull, match="the remaining capacity is for others"):
        scheduler.check_capacity(owner="greedy")


def test_a_prompt_that_fills_the_window_gets_logprobs_and_no_token() -> None:
    scheduler, ranks = make(), FakeRanks(4)
    seq = sequence(10, 0, logprobs=0, prompt_logprobs=True)
    scheduler.add(seq)
    run_to_end(scheduler, ranks)
    assert seq.output == [] and seq.finish_reason is FinishReason.LENGTH
    assert [p.logprob for p in seq.prompt_logprobs] == list(range(1, 10))


def test_a_sequence_whose_logits_are_not_finite_fails_alone() -> None:
    scheduler, ranks = make(), FakeRanks(4)
    bad, good = sequence(3, 5, ignore_eos=True), sequence(4, 5, ignore_eos=True)
    scheduler.add(bad)
    scheduler.add(good)
    batch = scheduler.schedule()
    assert batch is not None
    output = ranks.step(batch)
    scheduler.commit(replace(output, non_finite=[0]))
    assert bad.finish_reason is FinishReason.ERROR and bad.error is not None
    run_to_end(scheduler, ranks)
    assert good.output == expected_output(good)


class Machine(RuleBasedStateMachine):
    """Any order of add, abort, stop, schedule, commit and restart, over prompts with common prefixes."""

    sequences = Bundle("sequences")

    @initialize(
        num_blocks=st.integers(7, 20),
        slots=st.integers(1, 4),
        extra=st.integers(0, 12),
        depth=st.integers(1, 3),
        max_drafts=st.sampled_from([0, 4, 8]),
        prefix_caching=st.sampled_from([True, True, False]),
        model=st.sampled_from([arbitrary, repetitive]),
    )
    def start(
        self, num_blocks: int, slots: int, extra: int, depth: int, max_drafts: int, prefix_caching: bool, model: Model
    ) -> None:
        self.block_size = 4
        self.scheduler = make(
            num_blocks,
            self.block_size,
            slots,
            slots + extra,
            max_drafts=max_drafts,
            prefix_caching=prefix_caching,
        )
        self.model = model
        self.ranks = FakeRanks(self.block_size, model)
        self.in_flight: deque[StepOutput] = deque()
        self.depth = depth
        self.all: list[Sequence] = []

    @rule(
        target=sequences,
        prefix=st.sampled_from([[], [5] * 9, [*range(10, 19)], [7, 8] * 6]),
        own=st.lists(st.integers(3, 6), min_size=1, max_size=9),
        max_new=st.integers(0, 20),
        ignore=st.booleans(),
        lp=st.sampled_from([False, False, True]),
        seed=st.integers(0, 2),
        oracle=st.booleans(),
    )
    def add(
        self, prefix: list[int], own: list[int], max_new: int, ignore: bool, lp: bool, seed: int, oracle: bool
    ) -> Sequence:
        params = SamplingParams(ignore_eos=ignore, prompt_logprobs=lp, logprobs=0, seed=seed)
        prompt = prefix + own
        seq = Sequence(prompt, params, min(len(prompt) + max_new, 28))
        seq.drafting = Oracle(self.model, seed) if oracle else None
        self.scheduler.add(seq)
        self.all.append(seq)
        return seq

    @rule(seq=consumes(sequences))
    def abort(self, seq: Sequence) -> None:
        self.scheduler.finish(seq, FinishReason.ABORT)

    @rule()
    def schedule(self) -> None:
        if len(self.in_flight) < self.depth and (batch := self.scheduler.schedule()) is not None:
            assert batch.num_tokens <= self.scheduler.config.max_step_tokens
            assert batch.num_samples <= self.scheduler.config.max_batch_size + self.scheduler.config.max_drafts
            self.in_flight.append(self.ranks.step(batch))

    @rule()
    def commit(self) -> None:
        if self.in_flight:
            self.scheduler.commit(self.in_flight.popleft())

    @rule(num_steps=st.integers(2, 8))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.schedule()
            if len(self.in_flight) == self.depth:
                self.commit()

    @rule(sends_first=st.booleans())
    def commit_what_completes_a_stop_string(self, sends_first: bool) -> None:
        """The first new token of a sequence ends it; the others are removed, perhaps a step later."""
        if self.in_flight:
            gained = self.scheduler.commit(self.in_flight.popleft())
            if sends_first:
                self.schedule()
            for seq, tokens in gained.items():
                if tokens:
                    seq.cut(len(tokens) - 1)
                    self.scheduler.finish(seq, FinishReason.STOP)
                    seq.finish_reason = FinishReason.ABORT  # the last assertions then expect a prefix of its text
                    return

    @rule()
    def restart(self) -> None:
        self.in_flight.clear()
        self.ranks = FakeRanks(self.block_size, self.model)
        self.scheduler.restart(self.scheduler.epoch + 1)

    @invariant()
    def every_block_is_held_as_often_as_sequences_have_it(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pool, live = self.scheduler.pool, list(self.scheduler.live())
        holders = Counter(block for seq in live for block in seq.blocks)
        assert [holders[block] for block in range(pool.num_blocks)] == pool._num_holders
        assert set(pool._free) == {block for block in range(pool.num_blocks) if not holders[block]}
        for seq in live:
            assert len(set(seq.blocks)) == len(seq.blocks)
            still_written = seq.blocks[seq.scheduled // self.block_size :]
            assert all(holders[block] == 1 for block in still_written), "a block is written while it is shared"

    @invariant()
    def a_block_that_can_be_found_has_what_its_key_says(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pool, size = self.scheduler.pool, self.block_size
        named = {block: key for block, key in enumerate(pool.prefixes._hash_of) if key is not None}
        assert {key: block for block, key in named.items()} == pool.prefixes._block_of
        for block, key in named.items():
            tokens = self.ranks.cache[block * size + size - 1]
            assert len(tokens) % size == 0
            for i in range(size):
                assert self.ranks.cache[block * size + i] == tokens[: len(tokens) - size + i + 1]
            expected = b""
            for begin in range(0, len(tokens), size):
                expected = prefix_hash(expected, tokens[begin : begin + size])
            assert key == expected

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        live = list(self.scheduler.live())
        slots = [seq.slot for seq in live if seq.slot is not None]
        assert len(slots) == len(set(slots)) == self.scheduler.num_running
        assert all(not seq.finished for seq in live)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.in_flight:
            self.scheduler.commit(self.in_flight.popleft())
        run_to_end(self.scheduler, self.ranks)
        assert self.scheduler.pool.num_used == 0
        for seq in self.all:
            expected = expected_output(seq, self.model)
            if seq.finish_reason is FinishReason.ABORT:
                assert seq.output == expected[: len(seq.output)]
            else:
                assert seq.output == expected
                if seq.params.prompt_logprobs:
                    assert [p.logprob for p in seq.prompt_logprobs] == list(range(1, seq.prompt_len))
            positions = range(seq.prompt_len, seq.length)
            assert [p.logprob for p in seq.logprobs] == list(positions), "each token has its own logprob"


TestRandomOperations = Machine.TestCase
TestRandomOperations.settings = settings(max_examples=examples(50, 100), stateful_step_count=60, deadline=None)
