"""A common prefix is computed once, found again later, and never confused with another prefix."""

from collections import deque
from pathlib import Path

import pytest

from llama_core import Llama
from llama_core.execution.native.build import Unavailable
from llama_core.execution.parallel import alone
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.prefix_cache import prefix_hash
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepInput, StepOutput
from tests.support import on_ranks
from tests.support.fake_ranks import EOS, FakeRanks, expected_output

DEMO = Path(__file__).parents[3] / "demo"
PREFIX = [3 + i * 31 % 997 for i in range(400)]


def make(num_blocks: int = 2048, slots: int = 32, budget: int = 512, prefix_caching: bool = True) -> Scheduler:
    config = SchedulerConfig(slots, budget, frozenset({EOS}), prefix_caching=prefix_caching)
    return Scheduler(config, BlockPool(num_blocks, 16))


def sequence(prompt: list[int], max_new: int = 8, **params: object) -> Sequence:
    return Sequence(prompt, SamplingParams(ignore_eos=True, **params), len(prompt) + max_new)  # type: ignore[arg-type]


def run(scheduler: Scheduler, ranks: FakeRanks, sequences: list[Sequence], depth: int = 2) -> int:
    """Run all sequences to their end. Returns the number of computed tokens."""
    before = ranks.num_computed
    for seq in sequences:
        scheduler.add(seq)
    in_flight: deque[StepOutput] = deque()
    while scheduler.has_work:
        if len(in_flight) < depth and (batch := scheduler.schedule()) is not None:
            in_flight.append(ranks.step(batch))
        else:
            scheduler.commit(in_flight.popleft())
    for seq in sequences:
        assert seq.output == expected_output(seq)
    assert scheduler.pool.num_used == 0
    return ranks.num_computed - before


@pytest.mark.parametrize("budget", [64, 150, 512, 5000])
def test_requests_that_arrive_together_compute_their_common_prefix_once(budget: int) -> None:
    scheduler, ranks = make(budget=budget), FakeRanks(16)
    sequences = [sequence([*PREFIX, 1000 + i, 7, 8], seed=i) for i in range(32)]
    computed = run(scheduler, ranks, sequences)
    assert computed == 400 + 32 * (3 + 7), (
        "the prefix once; of each request its own tokens and all generated tokens but one"
    )
    assert scheduler.num_prefix_hits == 31 * 400
    assert [seq.num_cached for seq in sequences] == [0] + [400] * 31


def test_one_token_is_always_left_to_compute() -> None:
    scheduler, ranks = make(), FakeRanks(16)
    first, again = sequence(PREFIX[:64]), sequence(PREFIX[:64])
    run(scheduler, ranks, [first])
    assert run(scheduler, ranks, [again]) == 16 + 7 and again.num_cached == 48


def test_a_prefix_that_differs_in_one_token_is_not_shared() -> None:
    scheduler, ranks = make(), FakeRanks(16)
    run(scheduler, ranks, [sequence(PREFIX[:100])])
    for at in (0, 20, 47):
        changed = [*PREFIX[:at], 2000 + at, *PREFIX[at + 1 : 100]]
        run(scheduler, ranks, [seq := sequence(changed)])
        assert seq.num_cached == at // 16 * 16


def test_a_prefix_that_is_used_again_outlives_one_that_is_used_once() -> None:
    scheduler, ranks = make(num_blocks=24), FakeRanks(16)
    run(scheduler, ranks, [sequence(PREFIX[:160])])
    for i in range(30):
        run(scheduler, ranks, [sequence([3000 + i] * 100)])
        run(scheduler, ranks, [seq := sequence([*PREFIX[:160], 5000 + i])])
        assert seq.num_cached == 160


def test_a_preempted_sequence_computes_again_only_what_was_reused_meanwhile() -> None:
    once = 2 * (40 + 119)
    computed = {}
    for caching in (True, False):
        scheduler, ranks = make(num_blocks=16, slots=2, prefix_caching=caching), FakeRanks(16)
        # Admitted with 3 blocks each, both need 10: the younger is preempted and admitted again when the older has ended.
        old, young = sequence(PREFIX[:40], max_new=120), sequence(PREFIX[200:240], max_new=120)
        computed[caching] = run(scheduler, ranks, [old, young], depth=1)
        assert scheduler.num_preemptions == 1
        assert young.num_cached == 0, "blocks that it computed itself do not count as cached"
    assert computed == {False: once + 128, True: once + 32}, "of its 8 full blocks the older took the last 2"


def test_new_ranks_have_an_empty_prefix_cache() -> None:
    scheduler, ranks = make(), FakeRanks(16)
    run(scheduler, ranks, [sequence(PREFIX)])
    scheduler.restart(epoch=1)
    assert run(scheduler, FakeRanks(16), [sequence(PREFIX)]) == 400 + 7


def test_blocks_of_a_failed_request_are_not_shared() -> None:
    scheduler, ranks = make(), FakeRanks(16)
    ranks.non_finite_at = (0, 100)
    failing = sequence(PREFIX[:100])
    scheduler.add(failing)
    scheduler.commit(ranks.step(scheduler.schedule()))  # type: ignore[arg-type]
    assert failing.finish_reason is FinishReason.ERROR
    ranks.non_finite_at = None
    assert run(scheduler, ranks, [sequence(PREFIX[:100])]) == 100 + 7


@pytest.mark.parametrize("length", range(40, 57))
def test_a_token_in_flight_is_in_no_prefix_hash(length: int) -> None:
    scheduler, ranks = make(), FakeRanks(16)
    leaving = sequence(PREFIX[:length], max_new=20)
    scheduler.add(leaving)
    batches = [scheduler.schedule() for _ in range(4)]  # schedules up to 3 tokens beyond the committed ones
    scheduler.finish(leaving, FinishReason.ABORT)
    for batch in batches:
        scheduler.commit(ranks.step(batch))  # type: ignore[arg-type]
    keys = [b""]
    for begin in range(0, length - 15, 16):
        keys.append(prefix_hash(keys[-1], PREFIX[begin : begin + 16]))
    assert set(scheduler.pool.prefixes._block_of) == set(keys[1:])


@pytest.fixture(params=[pytest.param("torch", marks=pytest.mark.full), "native"])
def llama(request: pytest.FixtureRequest) -> Llama:
    try:
        return on_ranks.build(
            alone("cpu"), str(DEMO), max_seq_len=512, max_batch_size=32, max_step_tokens=512, backend=request.param
        )
    except Unavailable as error:
        pytest.skip(f"no native engine here: {error}")


def test_32_requests_behind_400_shared_tokens_get_the_same_texts_for_a_third_of_the_prefill(
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
