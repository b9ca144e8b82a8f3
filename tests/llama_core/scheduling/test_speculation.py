"""Drafts change the number of steps of a text and no token: what is proposed, when, and what a step costs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core import Llama
from llama_core.config import MAX_DRAFTS
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.drafting import (
    MAX_DRAFTS_PER_ROW,
    PRICE_ALONE,
    PRICE_BESIDE_OTHERS,
    DraftPrice,
    new_drafting,
)
from llama_core.scheduling.prompt_lookup import NGRAMS, PromptLookup
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.speculation import Speculation
from llama_core.scheduling.step_costs import StepCosts, StepShape
from tests.conftest import GOLDEN
from tests.support.fake_ranks import EOS, FakeRanks, Oracle, expected_output, run_to_end

BLOCK_SIZE = 4


def make(max_drafts: int = MAX_DRAFTS, slots: int = 4, num_blocks: int = 400, budget: int = 64) -> Scheduler:
    config = SchedulerConfig(slots, budget, frozenset({EOS}), max_drafts=max_drafts)
    return Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE))


def sequence(prompt: list[int], max_new: int, **params: object) -> Sequence:
    return Sequence(prompt, SamplingParams(**params), len(prompt) + max_new)  # type: ignore[arg-type]


def looping(tokens: list[int], seed: int = 0) -> int:
    return 3 + (tokens[-1] - 2) % 11


@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_that_repeats_itself_takes_a_fraction_of_the_steps(depth: int) -> None:
    scheduler = make()
    seq = sequence([3, 4, 5], 200)
    steps = run_to_end(scheduler, FakeRanks(BLOCK_SIZE, looping), [seq], depth)
    assert seq.output == expected_output(seq, looping)
    assert steps < 60, "11 to learn the loop, a few to trust it, then eight tokens a step"
    assert scheduler.speculation.num_accepted > 0.9 * scheduler.speculation.num_drafts


@pytest.mark.parametrize(("num_rows", "most"), [(1, 7), (2, 4), (3, 2), (4, 2), (5, 0), (30, 0)])
def test_running_sequences_share_the_drafts_and_beyond_four_there_are_none(num_rows: int, most: int) -> None:
    scheduler, ranks = make(slots=32, num_blocks=2000), FakeRanks(BLOCK_SIZE, looping)
    sequences = [sequence([3 + i % 5, 4, 5], 50) for i in range(num_rows)]
    for seq in sequences:
        seq.drafting = Oracle(looping, 0)
        scheduler.add(seq)
    largest = 0
    for _ in range(6):
        batch = scheduler.schedule()
        assert batch is not None
        largest = max(largest, *(row.num_drafts for row in batch.rows))
        scheduler.commit(ranks.step(batch))
    assert largest == most
    if not most:
        assert scheduler.speculation.num_drafts == 0


def test_blocks_for_drafts_are_taken_from_no_other_sequence() -> None:
    scheduler, ranks = make(num_blocks=6, slots=2), FakeRanks(BLOCK_SIZE, looping)
    first, second = sequence([3, 4, 5], 8), sequence([7, 8], 8)
    for seq in (first, second):
        seq.drafting = Oracle(looping, 0)
    run_to_end(scheduler, ranks, [first, second], 2)
    assert scheduler.num_preemptions == 0, "both fit unless drafts take blocks of the other"
    assert first.output == expected_output(first, looping) and second.output == expected_output(second, looping)


# Prompt lookup and the policy of speculation: the proposed drafts, and when they are worthwhile.


tokens_of_few_kinds = st.lists(st.integers(0, 4), max_size=60)


def by_search(tokens: list[int], count: int) -> list[int]:
    """Drafts by a search of all tokens: those after the latest occurrence of the longest suffix."""
    for n in NGRAMS:
        for begin in range(len(tokens) - n - 1, -1, -1):
            if tokens[begin : begin + n] == tokens[len(tokens) - n :]:
                guess = tokens[begin + n :]
                while len(guess) < count:
                    guess = guess + guess
                return guess[:count]
    return []


@given(tokens_of_few_kinds, st.integers(1, 9))
def test_drafts_continue_the_latest_occurrence_of_the_suffix(tokens: list[int], count: int) -> None:
    assert PromptLookup().propose(tokens, count) == by_search(tokens, count)


@given(tokens_of_few_kinds, st.lists(st.integers(1, 9), max_size=20))
def test_an_index_that_grew_with_the_text_equals_one_made_at_once(tokens: list[int], pieces: list[int]) -> None:
    lookup, seen = PromptLookup(), list[int]()
    for piece in pieces:
        seen += tokens[len(seen) : len(seen) + piece]
        assert lookup.propose(seen, 5) == PromptLookup().propose(seen, 5)


@pytest.mark.parametrize(("price", "num_accepted"), [(PRICE_ALONE, 2), (PRICE_BESIDE_OTHERS, 6)])
def test_a_few_accepted_drafts_make_drafting_worthwhile_and_rejected_ones_end_it(
    price: DraftPrice, num_accepted: int
) -> None:
    drafting = new_drafting()
    for _ in range(3):
        assert drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, price) == 0, "a new sequence has no history"
        drafting.observe(num_accepted, 0)
        assert drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, price) > 1
        drafting.observe(20, 0)
        assert drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, price) == MAX_DRAFTS_PER_ROW
        drafting.observe(0, 11)


# The learned time of a step's parts, and the drafts that pay by it.


DECODE_MS, ROW_MS, PROMPT_MS, DRAFT_MS = 6.0, 0.25, 0.4, 0.3


def true_ms(shape: StepShape) -> float:
    return DECODE_MS + ROW_MS * shape.num_decodes + PROMPT_MS * shape.num_prompt_tokens + DRAFT_MS * shape.num_drafts


def learned(noise: float = 0.0, num_steps: int = 400) -> StepCosts:
    costs, draw = StepCosts(), random.Random(1)
    for i in range(num_steps):
        decodes = draw.randrange(1, 9)
        shape = StepShape(decodes, (0, 128, 0)[i % 3], (0, 0, 14)[i % 3])
        costs.observe(shape, true_ms(shape) * draw.uniform(1 - noise, 1 + noise))
    return costs


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.06), (0.1, 0.15)])
def test_the_time_of_a_step_is_expected_from_the_steps_before_it(noise: float, within: float) -> None:
    costs = learned(noise)
    for shape in (
        StepShape(1, 0, 0),
        StepShape(8, 0, 0),
        StepShape(4, 200, 0),
        StepShape(0, 300, 0),
        StepShape(8, 0, 28),
    ):
        assert costs.step_ms(shape) == pytest.approx(true_ms(shape), rel=within)


def speculation(costs: StepCosts | None) -> Speculation:
    made = Speculation(32, 512, frozenset())
    made.costs = costs
    return made


def test_drafts_cost_more_with_every_sequence_that_runs_or_waits() -> None:
    made = speculation(learned())
    prices = [made.price(2, 0), made.price(4, 0), made.price(4, 4), made.price(8, 4)]
    assert [price.each for price in prices] == sorted({price.each for price in prices})
    drafting = new_drafting()
    drafting.observe(30, 0)  # nearly every draft is accepted
    counts = [drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, price) for price in prices]
    assert counts[0] == MAX_DRAFTS_PER_ROW and counts == sorted(counts, reverse=True)
    assert drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, made.price(8, 40)) == 0


@pytest.mark.parametrize("num_waiting", [0, 40])
def test_a_scheduler_sends_drafts_unless_those_who_wait_would_lose_more(num_waiting: int) -> None:
    config = SchedulerConfig(2, 64, frozenset(), max_drafts=8)
    scheduler = Scheduler(config, BlockPool(400, 4))
    scheduler.speculation.costs = learned()
    ranks = FakeRanks(4, lambda tokens, seed: 7)
    for i in range(2 + num_waiting):
        scheduler.add(Sequence([3, 4, 5 + i % 2], SamplingParams(temperature=0.0, ignore_eos=True), 60))
    for _ in range(15):
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.commit(ranks.step(batch))
    assert bool(scheduler.speculation.num_drafts) is not bool(num_waiting)


def test_ranks_that_schedule_for_themselves_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun every rank decides alike, so no decision may depend on its own clock."""
    made: list[Scheduler] = []

    class Recorded(Scheduler):
        def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
            super().__init__(config, pool)
            made.append(self)

    monkeypatch.setattr("llama_core.batch_loop.Scheduler", Recorded)
    llama = Llama.build(str(GOLDEN / "mp1"), str(GOLDEN / "mp1" / "tokenizer.model"), max_seq_len=64, max_batch_size=2)
    llama.text_completion(["one", "two"], max_gen_len=8)
    assert made and all(scheduler.speculation.costs is None for scheduler in made)
