"""The learned time of a step's parts, and the drafts that pay by it."""

import random

import pytest

from llama_core import Llama
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.drafting import (
    MAX_DRAFTS_PER_ROW,
    PRICE_ALONE,
    PRICE_BESIDE_OTHERS,
    new_drafting,
)
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.speculation import Speculation
from llama_core.scheduling.step import Row, StepInput
from llama_core.scheduling.step_costs import StepCosts, StepShape
from tests.conftest import GOLDEN
from tests.support.fake_ranks import FakeRanks

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


def test_the_shape_of_a_step_counts_decodes_prompt_tokens_and_drafts() -> None:
    rows = [Row(0, 9, 1, True), Row(1, 9, 4, True, 3), Row(2, 0, 100, False), Row(3, 100, 20, True)]
    assert StepShape.of(StepInput(0, 1, rows)) == StepShape(2, 120, 3)


def test_nothing_is_expected_before_its_parts_were_measured() -> None:
    costs = StepCosts()
    decode, prompt = StepShape(4, 0, 0), StepShape(4, 100, 0)
    assert costs.decode_ms(4) is costs.draft_ms(4) is costs.step_ms(decode) is None
    costs.observe(prompt, 50.0)
    assert costs.step_ms(prompt) is None, "the decodes' share of that step is unknown"
    costs.observe(decode, 10.0)
    assert costs.step_ms(decode) == 10.0 and costs.step_ms(prompt) is None
    costs.observe(prompt, 60.0)
    assert costs.step_ms(prompt) == pytest.approx(60.0)
    for nothing in (0.0, -1.0, float("nan"), float("inf")):
        costs.observe(decode, nothing)
        assert costs.step_ms(decode) == 10.0, "ranks that measure no time teach nothing"


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


def test_one_disturbed_step_changes_the_expected_time_little() -> None:
    costs, shape = learned(), StepShape(4, 0, 0)
    before = costs.step_ms(shape)
    assert before is not None
    costs.observe(shape, 100 * before)
    assert costs.step_ms(shape) == pytest.approx(before * (1 + 1.1 / 8))


def test_a_lasting_change_is_followed() -> None:
    costs, shape = learned(), StepShape(4, 0, 0)
    for _ in range(40):
        costs.observe(shape, 5 * true_ms(shape))
    assert costs.step_ms(shape) == pytest.approx(5 * true_ms(shape), rel=0.05)


def test_the_cost_of_a_draft_that_looked_too_high_is_forgotten() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.observe(StepShape(1, 0, 0), 10.0)
    first = costs.draft_ms(1)
    for _ in range(50):
        costs.observe(StepShape(1, 0, 7), 100.0)
    high = costs.draft_ms(1)
    for _ in range(8000):
        costs.observe(StepShape(1, 0, 0), 10.0)
    assert (
        first == pytest.approx(0.5)
        and high is not None
        and high > 5
        and costs.draft_ms(1) == pytest.approx(0.5, rel=0.1)
    )


def speculation(costs: StepCosts | None) -> Speculation:
    made = Speculation(32, 512, frozenset())
    made.costs = costs
    return made


def test_without_measurements_the_price_of_drafts_depends_on_nothing_but_other_running_sequences() -> None:
    for costs in (None, StepCosts()):
        made = speculation(costs)
        assert made.price(1, 0) == made.price(1, 9) == PRICE_ALONE
        assert made.price(2, 0) == made.price(9, 9) == PRICE_BESIDE_OTHERS


def test_drafts_cost_more_with_every_sequence_that_runs_or_waits() -> None:
    made = speculation(learned())
    prices = [made.price(2, 0), made.price(4, 0), made.price(4, 4), made.price(8, 4)]
    assert [price.each for price in prices] == sorted({price.each for price in prices})
    drafting = new_drafting()
    drafting.observe(30, 0)  # nearly every draft is accepted
    counts = [drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, price) for price in prices]
    assert counts[0] == MAX_DRAFTS_PER_ROW and counts == sorted(counts, reverse=True)
    assert drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, made.price(8, 40)) == 0


def test_a_sequence_alone_waits_for_its_output_only_where_drafts_gain_more_than_the_gap() -> None:
    costs = learned()
    drafting = new_drafting()
    drafting.observe(10, 0)
    for gap_ms, worthwhile in ((0.5, True), (60.0, False)):
        for _ in range(200):
            costs.observe_gap(gap_ms)
        assert bool(drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, speculation(costs).price(1, 0))) is worthwhile


def test_drafts_return_after_gaps_that_were_disturbed() -> None:
    """Without drafts every step is queued behind another, so no gap is measured that could correct the mean."""
    costs, drafting = learned(), new_drafting()
    drafting.observe(100, 0)
    for _ in range(200):
        costs.observe_gap(100.0)
    assert not drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, speculation(costs).price(1, 0))
    for _ in range(5000):
        costs.observe(StepShape(1, 0, 0), true_ms(StepShape(1, 0, 0)))
    assert drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, speculation(costs).price(1, 0)) == MAX_DRAFTS_PER_ROW


def test_a_first_sample_of_zero_is_forgotten() -> None:
    costs = StepCosts()
    costs.observe(StepShape(1, 0, 0), 100.0)  # slow, so that the next steps seem to cost nothing more
    costs.observe(StepShape(1, 64, 0), 30.0)
    costs.observe(StepShape(1, 0, 7), 30.0)
    costs.observe_gap(-1.0)
    for _ in range(300):
        for shape in (StepShape(1, 0, 0), StepShape(1, 64, 0), StepShape(1, 0, 7)):
            costs.observe(shape, true_ms(shape))
        costs.observe_gap(2.0)
    assert costs.prompt_token_ms == pytest.approx(PROMPT_MS, rel=0.01)
    assert costs.draft_ms(1) == pytest.approx(DRAFT_MS, rel=0.01)
    assert costs.gap_ms == pytest.approx(2.0, rel=0.01)


def test_a_sequence_of_one_prompt_token_counts_as_a_decode() -> None:
    """The ranks compute the same row, so its cost is the same."""
    seq = Sequence([5], SamplingParams(), 9)
    assert StepShape.of(StepInput(0, 1, [Row(0, 0, seq.length, True)])) == StepShape(1, 0, 0)


@pytest.mark.parametrize("num_waiting", [0, 40])
def test_a_scheduler_sends_drafts_unless_those_who_wait_would_lose_more(num_waiting: int) -> None:
    config = SchedulerConfig(2, 64, frozenset(), max_drafts=8)
    scheduler = Scheduler(config, BlockPool(400, 4))
    scheduler.use_costs(learned())
    ranks = FakeRanks(4, lambda tokens, seed: 7)
    for i in range(2 + num_waiting):
        scheduler.add(Sequence([3, 4, 5 + i % 2], SamplingParams(temperature=0.0, ignore_eos=True), 60))
    for _ in range(15):
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.commit(ranks.step(batch))
    assert bool(scheduler.num_drafts) is not bool(num_waiting)


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
