"""Fields of vLLM, SGLang and llama.cpp: each is followed, refused with a reason, or documented as one that changes nothing."""

from pathlib import Path
from typing import Any

import pytest

from deployments.http.errors import Unsupported
from deployments.http.limits import HttpLimits
from deployments.http.plan import Plan, plan_chat, plan_completion
from deployments.http.prompt_encoder import PromptEncoder
from deployments.http.request_body import validate
from deployments.http.schemas import ChatBody, CompletionBody
from deployments.http.unsupported import CHAT_NEUTRAL, COMPLETION_NEUTRAL, HARMLESS, REASONS
from llama_core.errors import InvalidParameter
from tests.support.engine_fields import (
    LLAMA_CPP_CHAT,
    LLAMA_CPP_COMPLETION,
    SGLANG_CHAT,
    SGLANG_COMPLETION,
    VLLM_CHAT,
    VLLM_COMPLETION,
)
from tests.support.scripted_engine import FakeEngine

REPOSITORY = Path(__file__).parents[3]
HELLO = [{"role": "user", "content": "x"}]
CHATS = VLLM_CHAT | SGLANG_CHAT | LLAMA_CPP_CHAT
COMPLETIONS = VLLM_COMPLETION | SGLANG_COMPLETION | LLAMA_CPP_COMPLETION
# Field -> values that switch it off, and values that would change the answer.
SWITCHES: dict[str, tuple[list[Any], list[Any]]] = {
    "thinking_token_budget": ([-1], [0, 100]),
    "logprob_token_ids": ([[]], [[5]]),
    "vllm_xargs": ([{}], [{"a": 1}]),
    "watermarking": ([False], [True]),
    "repetition_detection": ([{}, {"max_pattern_size": 0}], [{"max_pattern_size": 3, "min_count": 2}]),
    "max_repetition_pattern_size": ([0], [3]),
    "min_repetition_pattern_size": ([0], [3]),
    "kv_transfer_params": ([{}], [{"do_remote_decode": True}]),
    "ec_transfer_params": ([{}], [{"a": 1}]),
    "guided_whitespace_pattern": ([], ["[ ]?"]),
    "structural_tag": ([], ["{}"]),
    "early_stopping": ([False], [True]),
    "logits_processors": ([[]], [["p"]]),
    "stop_regex": (["", []], ["a+", ["a+"]]),
    "no_stop_trim": ([False], [True]),
    "min_new_tokens": ([0], [3]),
    "lora_path": ([[], ""], ["a", ["a"]]),
    "session_params": ([{}], [{"id": "a"}]),
    "custom_params": ([{}], [{"a": 1}]),
    "custom_logit_processor": ([""], ["a"]),
    "input_ids": ([], [[5]]),
    "separate_reasoning": ([True], [False]),
    "return_hidden_states": ([False], [True, "last"]),
    "return_routed_experts": ([False], [True]),
    "return_prompt_token_ids": ([False], [True]),
    "return_prompt_text": ([False], [True]),
    "return_meta_info": ([False], [True]),
    "enable_thinking": ([], [False]),
    "bootstrap_host": ([], ["h"]),
    "bootstrap_port": ([], [1]),
    "bootstrap_room": ([], [1]),
    "dynatemp_range": ([0, 0.0], [0.5]),
    "top_n_sigma": ([-1, 0.0], [1.5, True]),
    "typical_p": ([1], [0.9]),
    "typ_p": ([1], [0.9]),
    "xtc_probability": ([0], [0.5]),
    "dry_multiplier": ([0], [0.8]),
    "mirostat": ([0], [1, 2]),
    "adaptive_target": ([-1], [0.5]),
    "samplers": ([[], ""], [["top_k"], "k"]),
    "min_keep": ([0], [2]),
    "n_indent": ([0], [4]),
    "n_cmpl": ([1], [2]),
    "n_probs": ([0], [3]),
    "post_sampling_probs": ([False], [True]),
    "return_tokens": ([False], [True]),
    "response_fields": ([[]], [["content"]]),
    "t_max_predict_ms": ([0, -1], [100]),
    "t_max_prompt_ms": ([0, -1], [100]),
    "lora": ([[]], [[{"id": 0, "scale": 1}]]),
    "image_data": ([[]], [[{"data": "x", "id": 1}]]),
    "grammar_lazy": ([False], [True]),
    "grammar_triggers": ([[]], [[{"type": 0, "value": "x"}]]),
    "chat_format": ([], [1]),
    "chat_parser": ([], ["x"]),
    "generation_prompt": ([], ["x"]),
    "parse_tool_calls": ([True], [False]),
    "reasoning_format": (["auto", "deepseek"], ["none"]),
    "reasoning_control": ([False], [True]),
    "reasoning_budget_tokens": ([-1], [0, 100]),
    "thinking_budget_tokens": ([-1], [0, 100]),
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
    "reasoning": ([{}, {"enabled": True}], [{"effort": "high"}, {"enabled": False}]),
}
OF_COMPLETIONS: dict[str, tuple[list[Any], list[Any]]] = {"include_reasoning": ([True], [False])}
TEMPLATES = {"tools", "tool_choice", "continue_final_message", "add_generation_prompt", "chat_template_kwargs"}


async def plans(**fields: Any) -> tuple[Plan, Plan]:
    """The plans of a chat and of a completion."""
    engine = FakeEngine()
    encoder = PromptEncoder(engine, HttpLimits().text)
    chat = validate(ChatBody, {"messages": HELLO} | fields)
    completion = validate(CompletionBody, {"prompt": "x"} | fields)
    return await plan_chat(chat, engine, encoder), await plan_completion(completion, engine, encoder)


def test_no_field_of_another_server_is_ignored_in_silence() -> None:
    switched = SWITCHES.keys() | HARMLESS
    assert CHATS - ChatBody.model_fields.keys() <= switched | OF_CHATS.keys()
    assert COMPLETIONS - CompletionBody.model_fields.keys() <= switched | OF_COMPLETIONS.keys() | TEMPLATES
    assert CHAT_NEUTRAL.keys() >= (switched | OF_CHATS.keys())
    assert COMPLETION_NEUTRAL.keys() >= (switched | OF_COMPLETIONS.keys() | TEMPLATES)


def test_every_harmless_field_is_documented() -> None:
    page = (REPOSITORY / "docs" / "http.md").read_text()
    assert [name for name in HARMLESS if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("name", "values"), [*SWITCHES.items(), *OF_CHATS.items(), *OF_COMPLETIONS.items()], ids=lambda each: str(each)[:30]
)
async def test_a_field_is_refused_with_its_reason_unless_it_is_off(
    name: str, values: tuple[list[Any], list[Any]]
) -> None:
    off, on = values
    engine = FakeEngine()
    encoder = PromptEncoder(engine, HttpLimits().text)

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
    fields = {"mirostat": 2, "length_penalty": 0.5, "dry_multiplier": 0.8, "dynatemp_range": 0.5}
    body = validate(ChatBody, {"messages": HELLO, **fields})
    assert list(body.given()) == sorted({"messages", *fields})


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"n_predict": 7}, {"max_tokens": 7}),
        ({"n_predict": 7, "max_tokens": 7, "max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"n_predict": -1}, {"max_tokens": -1}),
        ({"max_new_tokens": 7, "max_tokens": 7}, {"max_tokens": 7}),
        ({"repeat_last_n": 10**6, "presence_penalty": 1}, {"presence_penalty": 1}),
        ({"regex": "", "ebnf": "", "grammar": "", "json_schema": ""}, {}),
        ({"repeat_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repeat_penalty": 1.3, "repeat_last_n": -1}, {"repetition_penalty": 1.3}),
        ({"repeat_penalty": 1, "repeat_last_n": 64}, {}),
        ({"regex": "[ab]+"}, {"structured_outputs": {"regex": "[ab]+"}}),
        ({"ebnf": 'root ::= "x" | "y"'}, {"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}),
        ({"json_schema": '{"type": "integer"}'}, {"structured_outputs": {"json": {"type": "integer"}}}),
        (dict.fromkeys(HARMLESS, 5), {}),
    ],
)
async def test_a_name_of_another_server_means_the_same(fields: dict[str, Any], same: dict[str, Any]) -> None:
    assert await plans(seed=5, **fields) == await plans(seed=5, **same)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": 7, "max_tokens": 8}, "n_predict"),
        ({"max_tokens": 7, "max_completion_tokens": 8}, "max_tokens"),
        ({"max_new_tokens": 7, "n_predict": 8}, "max_new_tokens"),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.3}, "repeat_penalty"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"n_predict": 7, "min_tokens": 8}, "min_tokens"),
    ],
)
async def test_names_of_one_field_must_agree(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        await plans(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "penalty",
    [{"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}, {"presence_penalty": 1}, {"frequency_penalty": -1}],
)
async def test_a_window_of_penalties_is_refused(penalty: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as refused:
        await plans(repeat_last_n=64, **penalty)
    assert refused.value.param == "repeat_last_n" and REASONS["repeat_last_n"] in refused.value.message
