"""Stop strings and stop tokens in the engine loop: where a stream ends, and what is left of it."""

from dataclasses import replace

import pytest

from llama_core.config import MAX_DRAFTS
from llama_core.scheduling.request import FinishReason, Request
from tests.support.fake_rank_group import FakeGroup
from tests.support.fake_ranks import EOS, continuation
from tests.support.loop_engine import TOKENIZER, greedy, read, running, submitted
from tests.support.requests import submit


@pytest.mark.parametrize("max_drafts", [0, MAX_DRAFTS])
async def test_tokens_of_one_step_behind_a_stop_string_are_removed(max_drafts: int) -> None:
    words = TOKENIZER.encode("one two three four", bos=False, eos=False)

    def rounds(tokens: list[int]) -> int:
        """Repeats the words six times, so that drafts are right, then continues with others."""
        if len(tokens) >= 2 + 6 * len(words):
            return TOKENIZER.encode("e", bos=False, eos=False)[0]
        return words[(len(tokens) - 2) % len(words)]

    group = FakeGroup(token=rounds)
    async with running(group, max_drafts=max_drafts) as loop:
        stream = submit(loop, [1, 3], greedy(90, logprobs=0), stop=["four e"])
        deltas = [delta async for delta in stream]
        tokens = [token for delta in deltas for token in delta.tokens]
        logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
        assert "".join(delta.text for delta in deltas) == ("one two three four " * 6).removesuffix("four ")
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert tokens == stream.sequence.output == continuation([1, 3], len(tokens), rounds)
        assert len(tokens) == 6 * len(words) + 1, "the token that completed the stop string is the last"
        assert [logprob.logprob for logprob in logprobs] == list(range(2, 2 + len(tokens)))
        assert loop.scheduler.pool.num_used == 0
        assert (loop.scheduler.speculation.num_accepted > 0) == (max_drafts > 0)


@pytest.mark.parametrize("max_drafts", [0, MAX_DRAFTS])
async def test_an_included_stop_token_has_its_text_and_logprob(max_drafts: int) -> None:
    words = TOKENIZER.encode("one two three four" * 5, bos=False, eos=False)
    group = FakeGroup(token=lambda tokens: [*words, 3, EOS][min(len(tokens) - 2, len(words) + 1)])
    for included in (False, True):
        async with running(group, max_drafts=max_drafts) as loop:
            params = greedy(90, logprobs=0, stop_token_ids=(3,), include_stop_str_in_output=included)
            stream = submit(loop, [1, 3], params)
            deltas = [delta async for delta in stream]
            tokens = [token for delta in deltas for token in delta.tokens]
            assert tokens == words + [3] * included
            assert "".join(delta.text for delta in deltas) == TOKENIZER.decode(tokens)
            assert len([logprob for delta in deltas for logprob in delta.logprobs]) == len(tokens)
            assert deltas[-1].finish_reason is FinishReason.STOP and stream.stop_reason == 3
            stopped = submit(loop, [1, 3], replace(params, stop_token_ids=()), stop=["o thr"])
            assert (await read(stopped))[0] == ("one two thr" if included else "one tw")
            assert stopped.stop_reason == "o thr"
            ended = submit(loop, [1, 3], replace(params, stop_token_ids=()))
            await read(ended)
            assert ended.sequence.finish_reason is FinishReason.STOP and ended.stop_reason is None
            assert loop.scheduler.pool.num_used == 0


@pytest.mark.parametrize("max_drafts", [0, MAX_DRAFTS])
@pytest.mark.parametrize("min_tokens", [0, 1, 15, 16, 17, 30])
async def test_a_stop_string_that_ends_in_the_first_min_tokens_is_text(min_tokens: int, max_drafts: int) -> None:
    group = FakeGroup(token=lambda tokens: 5)
    piece = TOKENIZER.decode([5])
    async with running(group, max_drafts=max_drafts) as loop:
        request = Request([[1, 3]], [greedy(40, min_tokens=min_tokens)], n=2, stop=(piece * 16,))
        for stream in submitted(loop, request):
            text, tokens, reason = await read(stream)
            assert len(tokens) == max(16, min_tokens + 1) and text == piece * (len(tokens) - 16)
            assert reason is FinishReason.STOP and stream.stop_reason == piece * 16
        (stream,) = submitted(loop, replace(request, params=[greedy(30, min_tokens=30)], n=1))
        text, tokens, reason = await read(stream)
        assert (text, reason) == (piece * 30, FinishReason.LENGTH)
        assert loop.num_live == 0


async def test_a_stop_string_wins_over_an_end_or_an_error_behind_it_in_the_same_step() -> None:
    """The stop string counts even if an end or a value that is not finite follows it in the same step."""
    group = FakeGroup(token=lambda tokens: 5 if len(tokens) < 30 else EOS)
    piece = TOKENIZER.decode([5])
    for non_finite_at in (None, (0, 21)):
        group.ranks.non_finite_at = non_finite_at
        async with running(group, max_drafts=MAX_DRAFTS) as loop:
            stream = submit(loop, [1, 3], greedy(60), stop=[piece * 16])
            _, tokens, reason = await read(stream)
            assert reason is FinishReason.STOP and stream.sequence.error is None
            assert len(tokens) == 16 and loop.scheduler.speculation.num_accepted > 0
