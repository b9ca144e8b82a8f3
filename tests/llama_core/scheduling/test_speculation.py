"""Drafts change the number of steps of a text and no token, for any drafts and beside any other sequences."""

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_core import Llama
from llama_core.config import MAX_DRAFTS
from llama_core.execution.native.build import Unavailable
from llama_core.execution.parallel import alone
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.drafting import MAX_DRAFTS_PER_ROW, Drafting
from llama_core.scheduling.prompt_lookup import PromptLookup
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepInput, StepOutput
from tests.conftest import GOLDEN
from tests.support import on_ranks
from tests.support.fake_ranks import EOS, FakeRanks, Model, Oracle, arbitrary, expected_output, repetitive
from tests.support.full_runs import examples

BLOCK_SIZE = 4


def make(max_drafts: int = MAX_DRAFTS, slots: int = 4, num_blocks: int = 400, budget: int = 64) -> Scheduler:
    config = SchedulerConfig(slots, budget, frozenset({EOS}), max_drafts=max_drafts)
    return Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE))


def sequence(prompt: list[int], max_new: int, **params: object) -> Sequence:
    return Sequence(prompt, SamplingParams(**params), len(prompt) + max_new)  # type: ignore[arg-type]


def run(scheduler: Scheduler, ranks: FakeRanks, sequences: list[Sequence], depth: int) -> int:
    """Run all sequences to their end. Returns the number of steps."""
    before = ranks.num_steps
    for seq in sequences:
        scheduler.add(seq)
    in_flight: deque[StepOutput] = deque()
    while scheduler.has_work:
        if len(in_flight) < depth and (batch := scheduler.schedule()) is not None:
            assert sum(row.num_drafts for row in batch.rows) <= scheduler.config.max_drafts
            assert all(row.num_drafts <= MAX_DRAFTS_PER_ROW for row in batch.rows)
            assert batch.num_tokens <= scheduler.config.max_step_tokens
            in_flight.append(ranks.step(batch))
        else:
            scheduler.commit(in_flight.popleft())
    assert scheduler.pool.num_used == 0
    return ranks.num_steps - before


requests = st.lists(
    st.tuples(
        st.lists(st.integers(3, 8), min_size=1, max_size=20),
        st.integers(1, 40),  # new tokens
        st.integers(0, 5),  # seed of the fake model, as of a sampled request
        st.booleans(),  # ignore_eos
        st.sampled_from(["none", "prompt lookup", "any pattern of right and wrong"]),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=examples(60, 150), deadline=None)
@given(
    requests=requests,
    model=st.sampled_from([arbitrary, repetitive]),
    depth=st.integers(1, 3),
    slots=st.integers(1, 5),
    num_blocks=st.integers(16, 60),
    budget=st.integers(5, 40),
)
def test_tokens_and_logprobs_are_the_same_with_and_without_speculation(
    requests: list[tuple[list[int], int, int, bool, str]],
    model: Model,
    depth: int,
    slots: int,
    num_blocks: int,
    budget: int,
) -> None:
    def serve(max_drafts: int) -> list[Sequence]:
        sequences = []
        for prompt, max_new, seed, ignore_eos, drafter in requests:
            seq = sequence(prompt, max_new, seed=seed, ignore_eos=ignore_eos, logprobs=0)
            if drafter == "any pattern of right and wrong":
                seq.drafting = Oracle(model, seed)
            sequences.append(seq)
        run(make(max_drafts, slots, num_blocks, budget), FakeRanks(BLOCK_SIZE, model), sequences, depth)
        return sequences

    for with_drafts, without in zip(serve(MAX_DRAFTS), serve(0), strict=True):
        assert with_drafts.tokens == without.tokens
        assert with_drafts.finish_reason is without.finish_reason
        assert with_drafts.logprobs == without.logprobs
        assert with_drafts.output == expected_output(with_drafts, model)


def looping(tokens: list[int], seed: int = 0) -> int:
    return 3 + (tokens[-1] - 2) % 11


@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_that_repeats_itself_takes_a_fraction_of_the_steps(depth: int) -> None:
    scheduler = make()
    seq = sequence([3, 4, 5], 200)
    steps = run(scheduler, FakeRanks(BLOCK_SIZE, looping), [seq], depth)
    assert seq.output == expected_output(seq, looping)
    assert steps < 60, "11 to learn the loop, a few to trust it, then eight tokens a step"
    assert scheduler.num_drafts_accepted > 0.9 * scheduler.num_drafts


@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_that_does_not_repeat_takes_no_step_more_and_no_draft(depth: int) -> None:
    steps = {}
    for max_drafts in (0, MAX_DRAFTS):
        scheduler = make(max_drafts)
        steps[max_drafts] = run(
            scheduler, FakeRanks(BLOCK_SIZE), [sequence([5, 6], 150, ignore_eos=True, seed=i) for i in range(3)], depth
        )
        assert scheduler.num_drafts == 0
    assert steps[0] == steps[MAX_DRAFTS]


def test_a_text_that_stops_repeating_gets_no_more_drafts_until_it_repeats_again() -> None:
    def model(tokens: list[int], seed: int = 0) -> int:
        return looping(tokens) if len(tokens) // 100 % 2 == 0 else arbitrary(tokens)

    scheduler, ranks = make(), FakeRanks(BLOCK_SIZE, model)
    seq = sequence([3, 4, 5], 400, ignore_eos=True)
    scheduler.add(seq)
    drafts = [0] * 5
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch is not None
        drafts[seq.length // 100] += sum(row.num_drafts for row in batch.rows)
        scheduler.commit(ranks.step(batch))
    assert seq.output == expected_output(seq, model)
    assert drafts[0] > 50 and drafts[2] > 50
    assert drafts[1] < 40 and drafts[3] < 40


def test_a_sequence_that_waits_for_its_output_delays_no_other() -> None:
    scheduler, ranks = make(), FakeRanks(BLOCK_SIZE, looping)
    drafting, other = sequence([3, 4, 5], 60), sequence([7, 8], 60)
    drafting.drafting = Oracle(looping, 0)
    scheduler.add(drafting)
    scheduler.add(other)
    scheduler.commit(ranks.step(scheduler.schedule()))  # type: ignore[arg-type]
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    assert [row.num_drafts > 0 for row in first.rows] == [True, False]
    assert [row.slot for row in second.rows] == [other.slot], (
        "its next row begins where the first step's draws will end"
    )
    scheduler.commit(ranks.step(first))
    third = scheduler.schedule()
    assert third is not None and [row.slot for row in third.rows] == [drafting.slot, other.slot]


def test_a_sequence_waits_for_its_output_also_when_new_sequences_end_all_drafting() -> None:
    scheduler, ranks = make(slots=8), FakeRanks(BLOCK_SIZE, looping)
    drafting = sequence([3, 4, 5], 60)
    drafting.drafting = Oracle(looping, 0)
    scheduler.add(drafting)
    scheduler.commit(ranks.step(scheduler.schedule()))  # type: ignore[arg-type]
    first = scheduler.schedule()
    assert first is not None and first.drafts
    others = [sequence([7 + i, 8], 20) for i in range(6)]
    for seq in others:
        scheduler.add(seq)
    second, third = scheduler.schedule(), scheduler.schedule()
    assert second is not None and third is not None
    assert drafting.slot not in {row.slot for row in second.rows + third.rows}
    for batch in (first, second, third):
        scheduler.commit(ranks.step(batch))
    run(scheduler, ranks, [], 2)
    for seq in (drafting, *others):
        assert seq.output == expected_output(seq, looping)


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
        assert scheduler.num_drafts == 0


def begun(model: Model, max_new: int = 40, **params: object) -> tuple[Scheduler, FakeRanks, Sequence]:
    """A sequence that decodes, and whose next row has an oracle's drafts; every second draft is right."""
    scheduler, ranks = make(), FakeRanks(BLOCK_SIZE, model)
    seq = sequence([3, 4, 5], max_new, **params)
    seq.drafting = AllRight(model, seq.params.seed)
    scheduler.add(seq)
    scheduler.commit(ranks.step(scheduler.schedule()))  # type: ignore[arg-type]
    return scheduler, ranks, seq


class AllRight(Oracle):
    """Proposes the tokens that will be sampled."""

    def propose(self, tokens: list[int], count: int) -> list[int]:
        truth = list(tokens)
        while len(truth) < len(tokens) + count:
            truth.append(self._model(truth, self._seed))
        return truth[len(tokens) :]


def test_an_end_of_sequence_among_accepted_drafts_ends_the_text_there() -> None:
    def model(tokens: list[int], seed: int = 0) -> int:
        return EOS if len(tokens) == 7 else looping(tokens)

    scheduler, ranks, seq = begun(model)
    batch = scheduler.schedule()
    assert batch is not None and batch.drafts[0].tokens == [7, 8, 9], "the drafts end before it"
    (tokens,) = scheduler.commit(ranks.step(batch)).values()
    assert tokens == [7, 8, 9] and seq.finish_reason is FinishReason.STOP
    assert seq.output == expected_output(seq, model) == [6, 7, 8, 9]


def test_drafts_leave_room_for_the_sample_behind_them() -> None:
    scheduler, ranks, seq = begun(looping, max_new=6)
    batch = scheduler.schedule()
    assert batch is not None and batch.rows[0].num_drafts == 4, (
        "one of six is there, four are proposed, one follows them"
    )
    (tokens,) = scheduler.commit(ranks.step(batch)).values()
    assert len(tokens) == 5 and seq.finish_reason is FinishReason.LENGTH


def test_only_accepted_samples_can_fail_a_request() -> None:
    scheduler, ranks, seq = begun(looping)
    batch = scheduler.schedule()
    assert batch is not None
    batch.drafts[0].tokens[2] = 99  # the samples behind it follow a wrong text
    output = replace(ranks.step(batch), non_finite=[4, 6])
    (tokens,) = scheduler.commit(output).values()
    assert tokens == [7, 8, 9] and seq.error is None and not seq.finished
    batch = scheduler.schedule()
    assert batch is not None
    (tokens,) = scheduler.commit(replace(ranks.step(batch), non_finite=[1])).values()
    assert tokens == [10] and seq.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("how", ["abort", "preempt", "restart"])
def test_a_sequence_may_be_preempted_aborted_or_restarted_while_its_drafts_are_checked(how: str) -> None:
    scheduler, ranks, seq = begun(looping)
    batch = scheduler.schedule()
    assert batch is not None and batch.drafts
    if how == "abort":
        scheduler.finish(seq, FinishReason.ABORT)
        assert scheduler.pool.num_used == 0 and scheduler.commit(ranks.step(batch)) == {}
        assert seq.output == [6]
        return
    if how == "preempt":
        scheduler._preempt_youngest()
        assert scheduler.schedule() is None, "its tokens are still in flight"
        scheduler.commit(ranks.step(batch))
        assert len(seq.output) == 9 and seq.scheduled == 0
    else:
        scheduler.restart(epoch=1)
        ranks = FakeRanks(BLOCK_SIZE, looping)
        assert seq.output == [6]
    run(scheduler, ranks, [], 2)
    assert seq.output == expected_output(seq, looping)


def test_blocks_for_drafts_are_taken_from_no_other_sequence() -> None:
    scheduler, ranks = make(num_blocks=6, slots=2), FakeRanks(BLOCK_SIZE, looping)
    first, second = sequence([3, 4, 5], 8), sequence([7, 8], 8)
    for seq in (first, second):
        seq.drafting = Oracle(looping, 0)
    run(scheduler, ranks, [first, second], 2)
    assert scheduler.num_preemptions == 0, "both fit unless drafts take blocks of the other"
    assert first.output == expected_output(first, looping) and second.output == expected_output(second, looping)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_model_gives_the_same_tokens_with_and_without_greedy_and_sampled(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(5)
    built = {"max_seq_len": 160, "max_batch_size": 4, "max_step_tokens": 64, "backend": backend}
    ckpt_dir = str(GOLDEN / "mp1")
    try:
        drafting, plain = (on_ranks.build(alone("cpu"), ckpt_dir, speculation=on, **built) for on in (True, False))  # type: ignore[arg-type]
    except Unavailable as error:
        pytest.skip(f"no native engine here: {error}")
    prompts = [[1, *(draw.randrange(3, 600) for _ in range(length))] for length in (4, 40, 17)]
    texts: list[list[int]] = []

    def propose(lookup: PromptLookup, tokens: list[int], count: int) -> list[int]:
        """Right drafts, then wrong ones."""
        (text,) = (text for text in texts if text[: len(tokens)] == tokens)
        num_right = draw.randrange(count + 2)
        return [
            token if i < num_right else token ^ 1 for i, token in enumerate(text[len(tokens) : len(tokens) + count])
        ]

    monkeypatch.setattr(PromptLookup, "propose", propose)
    monkeypatch.setattr(Drafting, "num_worthwhile", lambda lookup, limit, price: max(0, limit))
    steps = counted_steps(drafting, monkeypatch)
    for temperature in (0.0, 0.8):
        options = {"max_gen_len": 90, "temperature": temperature, "logprobs": True, "echo": True, "seed": 4}
        texts, logprobs = plain.generate(prompts, **options)  # type: ignore[arg-type]
        for batch in ([0], [1, 2], [0, 1, 2]):
            steps.clear()
            mine = drafting.generate([prompts[i] for i in batch], **options)  # type: ignore[arg-type]
            assert mine[0] == [texts[i] for i in batch]
            assert mine[1] is not None and logprobs is not None
            for i, values in zip(batch, mine[1], strict=True):
                assert values == pytest.approx(logprobs[i], abs=1e-4)
            assert len(steps) < 70, "some drafts were right"


def counted_steps(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> list[StepInput]:
    """The list of the steps that `llama` runs."""
    steps: list[StepInput] = []
    step = llama.runner.step
    monkeypatch.setattr(llama.runner, "step", lambda batch: steps.append(batch) or step(batch))  # type: ignore[func-returns-value]
    return steps
