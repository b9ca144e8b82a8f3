"""The typed API by handle, on the deployment's class over a fake group, without Serve."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any

import pytest

from deployments.handle.call import Call
from deployments.handle_types import ChatRequest, Sampled, Score
from deployments.openai.field_types import MAX_CHOICES
from llama_core.errors import DeadlineExceeded, InvalidParameter
from llama_core.scheduling.request import Request, TokenLogprob
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import StepInput, StepOutput
from llama_core.text.tokenizers.tokenizer import spellings
from tests.deployments.handles import ingress_over
from tests.support.fake_rank_group import FakeGroup
from tests.support.fake_ranks import FakeRanks, continuation
from tests.support.waiting import until_true


@pytest.fixture
async def ingress() -> AsyncIterator[Any]:
    group = FakeGroup()
    made = ingress_over(group, max_seq_len=64, max_batch_size=4)
    made.group = group
    await made.service.start()
    yield made
    await made.service.stop()


async def test_prompts_are_continued_with_their_own_parameters(ingress: Any) -> None:
    params = [SamplingParams(0.0, max_tokens=3, ignore_eos=True), SamplingParams(0.0, max_tokens=5)]
    found = await ingress.sample([[1, 5], [1, 9, 4]], params)
    assert [one.tokens for one in found] == [continuation([1, 5], 3), continuation([1, 9, 4], 5)]
    assert [one.finish_reason for one in found] == ["length", "stop"]
    assert [one.num_prompt_tokens for one in found] == [2, 3]
    tokenizer = ingress.service.service.tokenizer
    assert [one.text for one in found] == [tokenizer.decode(one.tokens) for one in found]
    assert ingress.service.describe().blocks_used == 0
    assert await ingress.sample([], params[0]) == []


async def test_a_stream_gives_the_same_in_parts(ingress: Any) -> None:
    params = SamplingParams(0.0, max_tokens=6, ignore_eos=True)
    [whole] = await ingress.sample([[1, 5]], params)
    parts: list[Sampled] = [part async for part in ingress.stream_sample([1, 5], params)]
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [part.finish_reason for part in parts][-1] == "length"


@pytest.mark.parametrize(
    ("num_prompts", "n"), [(1, 0), (1, MAX_CHOICES + 1), (1, 300_000), (1, "3"), (1, 1.5), (1, True), (3, 87), (261, 1)]
)
async def test_an_n_of_too_many_choices_is_refused_before_any_prompt_is_read(
    ingress: Any, monkeypatch: pytest.MonkeyPatch, num_prompts: int, n: Any
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(Call, "_tokens_of", read.append)
    with pytest.raises(InvalidParameter) as refused:
        await ingress.sample([[1, 5]] * num_prompts, SamplingParams(0.0, max_tokens=3), n=n)  # 4 run and 256 wait
    assert refused.value.param == "n" and not read


async def test_bad_words_are_texts_beside_the_parameters_own(ingress: Any) -> None:
    tokenizer = ingress.service.service.tokenizer
    params = SamplingParams(0.0, max_tokens=3, bad_words=((3, 4),))
    expected = ((3, 4), *spellings(["cat"], tokenizer))
    calls: list[Awaitable[Any]] = [
        ingress.sample([[1, 5]], params, bad_words=["cat"]),
        listed(ingress.stream_sample([1, 5], params, bad_words=("cat",))),
        ingress.chat(ChatRequest([{"role": "user", "content": "x"}], bad_words=("cat",)), params),
    ]
    submitted = watched(ingress)
    for call in calls:
        await call
    assert [own.bad_words for _, own in submitted] == [expected] * 3


async def test_a_call_ends_at_its_time_limit(ingress: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llama.requests")
    params = SamplingParams(0.0, max_tokens=40, ignore_eos=True)
    request = ChatRequest([{"role": "user", "content": "x"}], timeout_s=0.01)
    ingress.group.go.clear()  # nothing is computed
    calls: list[Awaitable[Any]] = [
        ingress.sample([[1, 5], [1, 6]], params, n=2, timeout_s=0.01),
        listed(ingress.stream_sample([1, 5], params, timeout_s=1e-9)),
        ingress.chat(request, params),
        listed(ingress.stream_chat(request, params)),
    ]
    for call in calls:
        with pytest.raises(DeadlineExceeded, match="the limit of this call"):
            await call
        assert ingress.service.describe().blocks_used == 0
    assert {each.levelno for each in caplog.records if "deadline_exceeded" in each.getMessage()} == {logging.INFO}
    ingress.group.go.set()
    assert (await ingress.sample([[1, 5]], params, timeout_s=600))[0].finish_reason == "length"


async def test_a_time_limit_that_is_no_positive_number_is_refused_first(ingress: Any) -> None:
    submitted = watched(ingress)
    for limit in ("5", True, 0, -1, math.nan, math.inf, 10**400, [5]):
        for call in timed_calls(ingress, limit):
            with pytest.raises(InvalidParameter) as refused:
                await call
            assert refused.value.param == "timeout_s"
    assert submitted == []


def timed_calls(ingress: Any, limit: Any) -> list[Awaitable[Any]]:
    """A call of each method that has a time limit."""
    params = SamplingParams(0.0, max_tokens=40, ignore_eos=True)
    request = ChatRequest([{"role": "user", "content": "x"}], timeout_s=limit)
    return [
        ingress.sample([[1, 5], [1, 6]], params, timeout_s=limit),
        listed(ingress.stream_sample([1, 5], params, timeout_s=limit)),
        ingress.chat(request, params),
        listed(ingress.stream_chat(request, params)),
    ]


async def test_invalid_parameters_are_named(ingress: Any) -> None:
    broken = [SamplingParams(grammar=text) for text in ("start: missing", '{"json_schema": {}}', '{"grammars": {}}')]
    hello = ChatRequest([{"role": "user", "content": "x"}])
    calls: list[tuple[Awaitable[Any], str]] = [(ingress.sample([[1, 5]], []), "params")]
    calls += [
        (call, "grammar") for each in broken for call in (ingress.sample([[1, 5]], each), ingress.chat(hello, each))
    ]
    pools = SamplingParams(max_tokens=0, pooling="mean")
    calls += [(ingress.sample([[1, 5]], pools), "pooling"), (ingress.chat(hello, pools), "pooling")]
    calls += [(ingress.score([1], [[]]), "continuations"), (ingress.score("hi", [""]), "continuations")]
    for call, param in calls:
        with pytest.raises(InvalidParameter) as refused:
            await call
        assert refused.value.param == param


def watched(ingress: Any) -> list[tuple[list[int], SamplingParams]]:
    """Every prompt that is submitted from now on, with its parameters."""
    submitted: list[tuple[list[int], SamplingParams]] = []
    submit = ingress.service.submit

    def noted(request: Request, **options: Any) -> Any:
        submitted.extend(request.choices())
        return submit(request, **options)

    ingress.service.submit = noted
    return submitted


async def listed(parts: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in parts]


class ScoringRanks(FakeRanks):
    """A token is its position's most likely one where the position is even."""

    def step(self, batch: StepInput) -> StepOutput:
        output = super().step(batch)
        for row, start, values in output.prompt_logprobs:
            tokens = self._tokens[batch.rows[row].slot]
            for at, entry in enumerate(values, start + 1):
                best = entry.logprob if at % 2 == 0 else entry.logprob + 1
                values[at - start - 1] = TokenLogprob(entry.logprob, ((tokens[at], best),))
        return output


async def test_prompts_are_scored_one_by_one_or_together(ingress: Any) -> None:
    ingress.group.ranks = ScoringRanks(16)
    one = await ingress.score([1, 5], [[7], [8, 9]])
    assert one == [Score(2.0, [7], [2.0], True), Score(5.0, [8, 9], [2.0, 3.0], False)]
    other = await ingress.score([1, 5, 6], [[7]])
    assert await ingress.score([[1, 5], [1, 5, 6]], [[[7], [8, 9]], [[7]]]) == [one, other]
    assert await ingress.score([[1, 5], [1, 5, 6]], [[], [[7]]]) == [[], other]
    assert ingress.service.describe().blocks_used == 0


async def test_prompts_without_continuations_are_scored_themselves(ingress: Any) -> None:
    ingress.group.ranks = ScoringRanks(16)
    encode = ingress.service.service.tokenizer.encode
    texts = ["hi", "hello there"]
    found = await ingress.score(texts)
    assert [one.tokens for one in found] == [encode(text, bos=True, eos=False)[1:] for text in texts]
    assert [one.token_logprobs for one in found] == [[float(1 + i) for i in range(len(one.tokens))] for one in found]
    assert await ingress.score("hi") == found[:1]
    dialog = [{"role": "user", "content": "hi"}]
    assert (
        len((await ingress.score(dialog))[0].tokens) == len(ingress.service.service.text.chat_format.encode(dialog)) - 1
    )
    assert await ingress.score([dialog, "hi"]) == [*await ingress.score(dialog), found[0]]


async def test_a_call_that_nobody_waits_for_leaves_no_sequence(ingress: Any) -> None:
    ingress.group.go.clear()  # nothing is computed
    params = SamplingParams(0.0, max_tokens=40)
    calls = [
        ingress.sample([[1, 5]] * 3, params),
        listed(ingress.stream_sample([1, 5], params)),
        ingress.score([1, 5], [[7], [8, 9]]),
    ]

    def num_sequences() -> int:
        state = ingress.service.describe()
        return int(state.requests_running + state.requests_waiting)

    for call in calls:
        task = asyncio.create_task(call)
        await until_true("its sequences are there", num_sequences, pause_s=0)
        task.cancel()
        await asyncio.wait([task])
        assert (num_sequences(), ingress.service.describe().blocks_used) == (0, 0)
    ingress.group.go.set()


async def test_the_prompts_logprobs_are_returned_where_they_are_asked_for(ingress: Any) -> None:
    asked = SamplingParams(0.0, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=True)
    prompt = [1, 5, 9, 4]
    [whole] = await ingress.sample([prompt], asked)
    assert [entry.logprob for entry in whole.prompt_logprobs] == [1.0, 2.0, 3.0]
    parts = [part async for part in ingress.stream_sample(prompt, asked)]
    assert [part.prompt_logprobs for part in parts] == [whole.prompt_logprobs] + [[]] * (len(parts) - 1)
    assert (await ingress.sample([prompt], replace(asked, prompt_logprobs=False)))[0].prompt_logprobs == []
    dialog = [{"role": "user", "content": "hi"}]
    answer = await ingress.chat(ChatRequest(dialog), asked)
    assert len(answer.prompt_logprobs) == len(ingress.service.service.text.chat_format.encode(dialog)) - 1
    plain = await ingress.chat(ChatRequest(dialog), replace(asked, prompt_logprobs=False))
    assert plain.prompt_logprobs == []
