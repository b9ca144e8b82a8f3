"""A common prefix is computed once, found again later, and never confused with another prefix."""

from pathlib import Path

import pytest

from llama_core import Llama
from llama_core.backends.native.build import Unavailable
from llama_core.backends.parallel import alone
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepInput, StepOutput
from tests.support import on_ranks
from tests.support.fake_ranks import EOS, FakeRanks, expected_output, run_to_end

DEMO = Path(__file__).parents[3] / "demo"
PREFIX = [3 + i * 31 % 997 for i in range(400)]


def make(num_blocks: int = 2048, slots: int = 32, budget: int = 512, prefix_caching: bool = True) -> Scheduler:
    config = SchedulerConfig(slots, budget, frozenset({EOS}), prefix_caching=prefix_caching)
    return Scheduler(config, BlockPool(num_blocks, 16))


def sequence(prompt: list[int], max_new: int = 8, **params: object) -> Sequence:
    return Sequence(prompt, SamplingParams(ignore_eos=True, **params), len(prompt) + max_new)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [64, 150, 512, 5000])
def test_requests_that_arrive_together_compute_their_common_prefix_once(budget: int) -> None:
    scheduler, ranks = make(budget=budget), FakeRanks(16)
    sequences = [sequence([*PREFIX, 1000 + i, 7, 8], seed=i) for i in range(32)]
    run_to_end(scheduler, ranks, sequences, depth=2)
    assert [seq.output for seq in sequences] == [expected_output(seq) for seq in sequences]
    assert ranks.num_computed == 400 + 32 * (3 + 7), (
        "the prefix once; of each request its own tokens and all generated tokens but one"
    )
    assert scheduler.num_prefix_hits == 31 * 400
    assert [seq.num_cached for seq in sequences] == [0] + [400] * 31


def test_a_prefix_that_differs_in_one_token_is_not_shared() -> None:
    scheduler, ranks = make(), FakeRanks(16)
    run_to_end(scheduler, ranks, [sequence(PREFIX[:100])])
    for at in (0, 20, 47):
        changed = [*PREFIX[:at], 2000 + at, *PREFIX[at + 1 : 100]]
        run_to_end(scheduler, ranks, [seq := sequence(changed)])
        assert seq.output == expected_output(seq)
        assert seq.num_cached == at // 16 * 16


@pytest.fixture(params=[pytest.param("torch", marks=pytest.mark.full), "native"])
def llama(request: pytest.FixtureRequest) -> Llama:
    try:
        return on_ranks.build(
            alone("cpu"), str(DEMO), max_seq_len=512, max_batch_size=32, max_step_tokens=512, backend=request.param
        )
    except Unavailable as error:
        pytest.skip(f"no native engine here: {error}")


def test_32_prompts_with_a_common_prefix_get_the_same_texts_for_a_third_of_prefill(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = llama.tokenizer.encode((DEMO / "heldout.txt").read_text()[:4000], bos=True, eos=False)[:400]
    assert len(shared) == 400
    prompts = [shared + llama.tokenizer.encode(f"Question {i}:", bos=False, eos=False) for i in range(32)]
    num_prefilled = 0
    step = llama.runner.step

    def counted(batch: StepInput) -> StepOutput:
        nonlocal num_prefilled
        num_prefilled += sum(row.length for row in batch.rows if row.length > 1)
        return step(batch)

    monkeypatch.setattr(llama.runner, "step", counted)
    together, _ = llama.generate(prompts, 8, temperature=0.7, seed=3)
    assert 3 * num_prefilled <= sum(map(len, prompts))
    assert num_prefilled < 400 + 32 * 16
    assert together == [llama.generate([prompt], 8, temperature=0.7, seed=3)[0][0] for prompt in prompts]
