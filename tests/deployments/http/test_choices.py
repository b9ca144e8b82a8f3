"""All choices of a request as one stream: capacity is checked once, and the prompt's logprobs are computed once."""

from typing import Any

import pytest

from deployments.http.choices import Choices
from deployments.openai.plan import Plan
from llama_core.errors import InvalidParameter, QueueFull
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.loop_engine import LoopEngine, submitted

PROMPT = [1, *range(3, 60)]


def make_loop(slots: int = 32, **limits: int) -> LoopEngine:
    engine = LoopEngine(slots=slots, max_waiting=None, step_tokens=64, num_blocks=20_000, max_seq_len=4096)
    engine.scheduler.admission.limit(limits.get("max_waiting"), limits.get("max_waiting_tokens"))
    return engine


def chosen(loop: LoopEngine, plan: Plan) -> Choices:
    return Choices(submitted(loop, plan.request), plan)


async def test_forty_prompts_of_three_thousand_tokens_are_taken_by_an_idle_server() -> None:
    """32 of them find a free slot; only the 8 that wait count against max_queue_tokens."""
    params = SamplingParams(max_tokens=2)
    loop = make_loop(max_waiting=256, max_waiting_tokens=65_536)
    choices = chosen(loop, Plan(Request([[1] * 3000] * 40, [params] * 40)))
    assert len(choices.streams) == 40
    with pytest.raises(QueueFull):
        chosen(loop, Plan(Request([[1] * 3000] * 15, [params] * 15)))


@pytest.mark.parametrize(
    ("num_prompts", "n", "limits", "message"),
    [
        (1, 64, {"max_waiting": 2}, r"64 choices .* at most 34 .* 32 that run .* 2 that wait \(max_queue\)"),
        (40, 1, {"max_waiting_tokens": 400}, r"8 choices of 464 prompt tokens .* at most 400 .*max_queue_tokens"),
    ],
)
async def test_a_request_that_no_idle_server_could_take_is_refused_with_both_numbers(
    num_prompts: int, n: int, limits: dict[str, int], message: str
) -> None:
    loop = make_loop(**limits)
    with pytest.raises(InvalidParameter, match=message):
        chosen(loop, Plan(Request([PROMPT] * num_prompts, [SamplingParams(max_tokens=2)] * num_prompts, n=n)))
    assert loop.num_live == 0, "none of its choices was taken"


async def read_all(choices: Choices) -> list[tuple[list[int], list[Any]]]:
    """Each choice's tokens, and the prompt logprobs that a reader of its first delta sees."""
    tokens: list[list[int]] = [[] for _ in choices.streams]
    seen: list[list[Any]] = [[] for _ in choices.streams]
    while choices.num_open:
        await choices.wait()
        while (taken := choices.take()) is not None:
            index, delta = taken
            tokens[index] += delta.tokens
            seen[index] = seen[index] or list(choices.streams[0].prompt_logprobs)
    choices.cancel()
    return list(zip(tokens, seen, strict=True))


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_prompt_logprobs_of_four_choices_are_computed_once_and_known_to_all(max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, logprobs=0, prompt_logprobs=True, ignore_eos=True)
    loop = make_loop(slots=4)
    async with loop.running():
        results = await read_all(chosen(loop, Plan(Request([PROMPT], [params], n=4), echo=True)))
    assert [len(tokens) for tokens, _ in results] == [max_tokens] * 4
    assert all([p.logprob for p in seen] == list(range(1, len(PROMPT))) for _, seen in results)
    admitted = [init for step in loop.group.steps for init in step.admit]
    assert sum(init.prompt_logprobs for init in admitted) == 1
    num_rows = sum(row.length for step in loop.group.steps for row in step.rows)
    assert num_rows < 2 * len(PROMPT), "the other choices found the prompt in the prefix cache"
