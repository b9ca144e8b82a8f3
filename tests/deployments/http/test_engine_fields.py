"""Fields of vLLM: each is followed, refused with a reason, or documented as one that changes nothing."""

from pathlib import Path
from typing import Any

import pytest

from deployments.http.limits import HttpLimits
from deployments.openai.errors import Unsupported
from deployments.openai.plan import Plan, plan_chat, plan_completion
from deployments.openai.prompt_encoder import PromptEncoder
from deployments.openai.schemas import ChatBody, CompletionBody
from deployments.openai.unsupported import CHAT_NEUTRAL, COMPLETION_NEUTRAL, REASONS, SUCCESSORS
from deployments.openai.validation import validate
from tests.deployments.http.engine_fields import HARMLESS, VLLM_CHAT, VLLM_COMPLETION
from tests.support.scripted_engine import FakeEngine

REPOSITORY = Path(__file__).parents[3]
HELLO = [{"role": "user", "content": "x"}]
# Field -> values that switch it off, and values that would change the answer.
SWITCHES: dict[str, tuple[list[Any], list[Any]]] = {
    "thinking_token_budget": ([-1], [0, 100]),
    "logprob_token_ids": ([[]], [[5]]),
    "vllm_xargs": ([{}], [{"a": 1}]),
    "watermarking": ([False], [True]),
    "repetition_detection": ([{}, {"max_pattern_size": 0}], [{"max_pattern_size": 3, "min_count": 2}]),
    "kv_transfer_params": ([{}], [{"do_remote_decode": True}]),
    "ec_transfer_params": ([{}], [{"a": 1}]),
    "guided_whitespace_pattern": ([], ["[ ]?"]),
    "early_stopping": ([False], [True]),
    "logits_processors": ([[]], [["p"]]),
    "return_prompt_text": ([False], [True]),
    "typical_p": ([1], [0.9]),
    "use_beam_search": ([False], [True]),
    "length_penalty": ([1], [2]),
    "prompt_embeds": ([], ["x"]),
    "truncate_prompt_tokens": ([], [5]),
    "chat_template": ([], ["x"]),
    "documents": ([[]], [[{"text": "x"}]]),
    "suffix": ([""], ["x"]),
}
OF_CHATS: dict[str, tuple[list[Any], list[Any]]] = {
    "echo": ([False], [True]),
    "best_of": ([1], [2]),
    "add_special_tokens": ([False], [True]),
    "reasoning": ([{}, {"enabled": True}, {"effort": "high"}], [{"enabled": False}]),
}
OF_COMPLETIONS: dict[str, tuple[list[Any], list[Any]]] = {"include_reasoning": ([True], [False])}
TEMPLATES = {"tools", "tool_choice", "continue_final_message", "add_generation_prompt", "chat_template_kwargs"}


async def plans(**fields: Any) -> tuple[Plan, Plan]:
    """The plans of a chat and of a completion."""
    engine = FakeEngine()
    encoder = PromptEncoder(HttpLimits().text).of("", engine)
    chat = validate(ChatBody, {"messages": HELLO} | fields)
    completion = validate(CompletionBody, {"prompt": "x"} | fields)
    return await plan_chat(chat, engine, encoder), await plan_completion(completion, engine, encoder)


def test_no_field_of_vllm_that_changes_an_answer_is_ignored_in_silence() -> None:
    switched = SWITCHES.keys() | SUCCESSORS.keys()
    assert VLLM_CHAT - HARMLESS - ChatBody.model_fields.keys() <= switched | OF_CHATS.keys()
    assert VLLM_COMPLETION - HARMLESS - CompletionBody.model_fields.keys() <= switched | OF_COMPLETIONS.keys()
    assert CHAT_NEUTRAL.keys() >= switched | OF_CHATS.keys()
    assert COMPLETION_NEUTRAL.keys() >= switched | OF_COMPLETIONS.keys() | TEMPLATES


def test_every_harmless_field_is_documented() -> None:
    page = (REPOSITORY / "docs" / "http.md").read_text()
    assert [name for name in sorted(HARMLESS) if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("name", "values"), [*SWITCHES.items(), *OF_CHATS.items(), *OF_COMPLETIONS.items()], ids=lambda each: str(each)[:30]
)
async def test_a_field_is_refused_with_its_reason_unless_it_is_off(
    name: str, values: tuple[list[Any], list[Any]]
) -> None:
    off, on = values
    engine = FakeEngine()
    encoder = PromptEncoder(HttpLimits().text).of("", engine)

    async def plan(value: Any) -> None:
        if name not in OF_COMPLETIONS:
            await plan_chat(validate(ChatBody, {"messages": HELLO, name: value}), engine, encoder)
        if name not in OF_CHATS:
            await plan_completion(validate(CompletionBody, {"prompt": "x", name: value}), engine, encoder)

    for value in off:
        await plan(value)
    for value in on:
        with pytest.raises(Unsupported) as refused:
            await plan(value)
        assert refused.value.message == f"{name}: not supported by this server: {REASONS[name]}"
        assert refused.value.param == name


def test_of_several_refused_fields_every_process_names_the_same() -> None:
    """A set's order of names depends on the process."""
    fields = {"typical_p": 0.5, "length_penalty": 0.5, "suffix": "x", "early_stopping": True}
    body = validate(ChatBody, {"messages": HELLO, **fields})
    assert list(body.given(fields)) == sorted({"messages", *fields})


@pytest.mark.parametrize(
    ("name", "successor", "value"),
    [
        ("guided_grammar", {"structured_outputs": {"grammar": 'root ::= "x"'}}, 'root ::= "x"'),
        ("guided_regex", {"structured_outputs": {"regex": "a+"}}, "a+"),
        ("guided_choice", {"structured_outputs": {"choice": ["a", "b"]}}, ["a", "b"]),
        ("guided_json", {"structured_outputs": {"json": {"type": "integer"}}}, {"type": "integer"}),
        ("n_predict", {"max_tokens": 7}, 7),
        ("repeat_penalty", {"repetition_penalty": 1.3}, 1.3),
    ],
)
async def test_a_removed_name_is_ignored_beside_its_equal_successor_and_refused_alone(
    name: str, successor: dict[str, Any], value: Any
) -> None:
    """guidance sends vLLM both."""
    assert await plans(seed=5, **successor, **{name: value}) == await plans(seed=5, **successor)
    for beside in ({}, successor):
        with pytest.raises(Unsupported) as refused:
            await plans(**beside, **{name: "another" if beside else value})
        assert refused.value.message == f"{name}: not supported by this server: the field is {SUCCESSORS[name]}"
        assert refused.value.param == name


async def test_of_the_two_names_of_the_limit_the_newer_one_counts() -> None:
    assert await plans(max_tokens=7, max_completion_tokens=8, seed=5) == await plans(max_tokens=8, seed=5)


async def test_hints_that_change_nothing_pass() -> None:
    hints = {
        "prediction": {"type": "content", "content": "x"},
        "reasoning_effort": "any word",
        "enable_thinking": False,
    }
    assert await plans(seed=5, **hints) == await plans(seed=5)


async def test_fields_that_change_no_answer_may_have_any_value() -> None:
    assert await plans(seed=5, **dict.fromkeys(HARMLESS, 5), mirostat=2) == await plans(seed=5)
