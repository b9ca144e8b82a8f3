"""The scheduler under random requests, aborts, preemptions, pipelining and restarts: nothing leaks, nothing is lost."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from llama_core.batch import PromptLogprobs, StepInput, StepOutput
from llama_core.blocks import BlockPool
from llama_core.errors import QueueFull
from llama_core.request import FinishReason, SamplingParams, Sequence, TokenLogprob
from llama_core.scheduler import Scheduler, SchedulerConfig

EOS = 2


def next_token(prefix: list[int]) -> int:
    """A stand-in for the model: the next token depends on every token before it. About one in twelve is EOS."""
    value = hash(tuple(prefix)) % 1009
    return EOS if value % 12 == 0 else 3 + value


class FakeRanks:
    """Remembers slots as a rank does and recomputes nothing that was not sent: a wrong message gives a wrong token."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.cache: dict[int, tuple[int, int]] = {}  # physical position -> (slot's admission, token)
        self.admission: dict[int, int] = {}
        self.prompt_logprobs: dict[int, bool] = {}
        self.count = 0

    def step(self, batch: StepInput) -> StepOutput:
        for init in batch.admit:
            self.count += 1
            self.tokens[init.slot] = list(init.tokens)
            self.blocks[init.slot] = list(init.blocks)
            self.admission[init.slot] = self.count
            self.prompt_logprobs[init.slot] = init.prompt_logprobs
        for slot, block in batch.grow:
            self.blocks[slot].append(block)
        sampled: list[int] = []
        prompt_logprobs: list[PromptLogprobs] = []
        for index, (slot, start, count, samples) in enumerate(batch.rows):
            tokens = self.tokens[slot]
            assert start + count <= len(tokens), "a row of tokens that the rank does not know"
            for position in range(start, start + count):
                self.cache[self.physical(slot, position)] = (self.admission[slot], tokens[position])
            for position in range(start + count):
                assert self.cache[self.physical(slot, position)] == (self.admission[slot], tokens[position])
            values = [TokenLogprob(float(p), []) for p in range(start + 1, min(start + count + 1, len(tokens)))]
            if self.prompt_logprobs[slot] and values:
                prompt_logprobs.append(PromptLogprobs(index, start, values))
            if samples:
                assert start + count == len(tokens)
                tokens.append(next_token(tokens))
                sampled.append(tokens[-1])
        return StepOutput(batch.epoch, batch.step, sampled, prompt_logprobs=prompt_logprobs)

    def physical(self, slot: int, position: int) -> int:
        return self.blocks[slot][position // self.block_size] * self.block_size + position % self.block_size


def expected_output(seq: Sequence) -> list[int]:
    tokens = list(seq.prompt)
    while len(tokens) < seq.max_length:
        token = next_token(tokens)
        if token == EOS and not seq.params.ignore_eos:
            break
        tokens.append(token)
    return tokens[seq.prompt_len :]


def make(
    num_blocks: int = 8, block_size: int = 4, slots: int = 3, budget: int = 6, max_waiting: int | None = None
) -> Scheduler:
    return Scheduler(SchedulerConfig(slots, budget, EOS, max_waiting), BlockPool(num_blocks, block_size))


def sequence(prompt_len: int, max_new: int, **params: object) -> Sequence:
    prompt = [3 + (prompt_len * 7 + i) % 50 for i in range(prompt_len)]
    return Sequence(prompt, SamplingParams(**params), prompt_len + max_new)  # type: ignore[arg-type]


def run_to_end(scheduler: Scheduler, ranks: FakeRanks, depth: int = 1) -> None:
    flights: deque[StepOutput] = deque()
    for _ in range(100_000):
        batch = scheduler.schedule() if len(flights) < depth else None
        if batch is not None:
            flights.append(ranks.step(batch))
        elif flights:
            scheduler.commit(flights.popleft())
        else:
            assert not scheduler.has_work
            return
    raise AssertionError("no end: some sequence starves")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_sequence_gets_its_own_tokens_whatever_runs_beside_it(depth: int) -> None:
    scheduler = make()
    sequences = [sequence(n, 9, ignore_eos=n % 2 == 0) for n in (1, 5, 13, 2, 8, 20, 3)]
    for seq in sequences:
        scheduler.add(seq)
    run_to_end(scheduler, FakeRanks(4), depth)
    for seq in sequences:
        assert seq.output == expected_output(seq)
    assert scheduler.pool.num_used == 0


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
        assert batch.rows[0].slot == short.slot and batch.rows[0].length == 1, "the decode goes on, and first"
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
    requeue = scheduler._requeue
    scheduler._requeue = lambda seq: victims.append(seq) or requeue(seq)  # type: ignore[method-assign,func-returns-value]
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
    assert scheduler.commit(ranks.step(batch)) == []
    assert scheduler.schedule() is None and not scheduler.has_work


def test_a_full_queue_is_refused_and_a_free_slot_is_not_queueing() -> None:
    scheduler = make(slots=1, max_waiting=1)
    scheduler.check_room(2)
    with pytest.raises(QueueFull):
        scheduler.check_room(3)
    scheduler.add(sequence(2, 2))
    scheduler.schedule()
    scheduler.check_room(1)
    scheduler.add(sequence(2, 2))
    with pytest.raises(QueueFull):
        scheduler.check_room(1)


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
    scheduler.commit(StepOutput(output.epoch, output.step, output.tokens, non_finite=[0]))
    assert bad.finish_reason is FinishReason.ERROR and bad.error is not None
    run_to_end(scheduler, ranks)
    assert good.output == expected_output(good)


class Machine(RuleBasedStateMachine):
    """Any order of add, abort, schedule, commit and restart."""

    sequences = Bundle("sequences")

    @initialize(
        num_blocks=st.integers(7, 20), slots=st.integers(1, 4), extra=st.integers(0, 8), depth=st.integers(1, 3)
    )
    def start(self, num_blocks: int, slots: int, extra: int, depth: int) -> None:
        self.block_size = 4
        self.scheduler = make(num_blocks, self.block_size, slots, slots + extra)
        self.ranks = FakeRanks(self.block_size)
        self.flights: deque[StepOutput] = deque()
        self.depth = depth
        self.all: list[Sequence] = []

    @rule(
        target=sequences,
        prompt_len=st.integers(1, 18),
        max_new=st.integers(0, 10),
        ignore=st.booleans(),
        lp=st.booleans(),
    )
    def add(self, prompt_len: int, max_new: int, ignore: bool, lp: bool) -> Sequence:
        seq = sequence(prompt_len, max_new, ignore_eos=ignore, prompt_logprobs=lp)
        self.scheduler.add(seq)
        self.all.append(seq)
        return seq

    @rule(seq=consumes(sequences))
    def abort(self, seq: Sequence) -> None:
        self.scheduler.finish(seq, FinishReason.ABORT)

    @rule()
    def schedule(self) -> None:
        if len(self.flights) < self.depth and (batch := self.scheduler.schedule()) is not None:
            assert batch.num_tokens <= self.scheduler.config.max_step_tokens
            self.flights.append(self.ranks.step(batch))

    @rule()
    def commit(self) -> None:
        if self.flights:
            self.scheduler.commit(self.flights.popleft())

    @rule()
    def restart(self) -> None:
        self.flights.clear()
        self.ranks = FakeRanks(self.block_size)
        self.scheduler.restart(self.scheduler.epoch + 1)

    @invariant()
    def every_block_and_slot_has_one_owner(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        live = list(self.scheduler.live())
        owned = [block for seq in live for block in seq.blocks]
        assert len(owned) == len(set(owned)) == self.scheduler.pool.num_used
        slots = [seq.slot for seq in live if seq.slot is not None]
        assert len(slots) == len(set(slots)) == self.scheduler.num_running
        assert all(not seq.finished for seq in live)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.flights:
            self.scheduler.commit(self.flights.popleft())
        run_to_end(self.scheduler, self.ranks)
        assert self.scheduler.pool.num_used == 0
        for seq in self.all:
            if seq.finish_reason is FinishReason.ABORT:
                expected = expected_output(seq)
                assert seq.output == expected[: len(seq.output)]
            else:
                assert seq.output == expected_output(seq)
                if seq.params.prompt_logprobs:
                    assert [p.logprob for p in seq.prompt_logprobs] == list(range(1, seq.prompt_len))


TestRandomOperations = Machine.TestCase
TestRandomOperations.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
