"""The learned time of a step's parts, and the drafts that pay by it."""

import random

import pytest

from llama_core import Llama
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.drafting import MAX_DRAFTS_PER_ROW, new_drafting
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.speculation import Speculation
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
