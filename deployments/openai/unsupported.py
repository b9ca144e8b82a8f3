"""The fields of OpenAI, Anthropic and vLLM that this server does not support, and the values of them that change nothing."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from deployments.openai.errors import Unsupported
from deployments.openai.field_types import Body

Test = Callable[[object], bool]
# Field -> test for values that do not change the answer. Others are refused, never ignored.
Neutral = dict[str, Test]


def equals(*neutral: object) -> Test:
    """Tests whether a value equals one of these and is of its type: JSON's false is not 0."""
    return lambda value: any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


def has(**tests: Test) -> Test:
    """Tests whether a value is an object whose fields of these names, where it has them, pass their tests."""
    return lambda value: (
        isinstance(value, dict)
        and all(value.get(name) is None or is_neutral(value[name]) for name, is_neutral in tests.items())
    )


def any_value(_: object) -> bool:
    """Of fields that never change the answer."""
    return True


empty = equals([], {}, "", False)
no_value = equals()

# vLLM's removed names and other servers' names of fields: refused with the name of the field, ignored beside it with its value.
SUCCESSORS = {
    "guided_json": "structured_outputs.json", "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice", "guided_grammar": "structured_outputs.grammar",
    "structural_tag": "structured_outputs.structural_tag",
    "json_schema": "structured_outputs.json", "regex": "structured_outputs.regex", "grammar": "structured_outputs.grammar",
    "ebnf": "structured_outputs.grammar", "n_predict": "max_tokens", "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens", "repeat_penalty": "repetition_penalty", "n_cmpl": "n",
}  # fmt: skip
NEUTRAL: Neutral = dict.fromkeys(SUCCESSORS, empty) | {
    "length_penalty": equals(1), "typical_p": equals(1), "suffix": equals(""), "use_beam_search": equals(False),
    "early_stopping": equals(False),
    "modalities": equals(["text"]), "audio": no_value, "prediction": any_value, "moderation": no_value,
    "prompt_embeds": no_value, "truncate_prompt_tokens": no_value,
    "logits_processors": empty, "chat_template": no_value, "documents": empty,
    "thinking_token_budget": equals(-1), "logprob_token_ids": empty, "vllm_xargs": empty, "watermarking": equals(False),
    "repetition_detection": has(max_pattern_size=equals(0)), "kv_transfer_params": empty, "ec_transfer_params": empty,
    "return_prompt_text": equals(False), "guided_whitespace_pattern": no_value,
}  # fmt: skip
COMPLETION_NEUTRAL: Neutral = NEUTRAL | {
    "tools": empty, "tool_choice": equals("none"), "functions": empty, "function_call": equals("none"),
    "reasoning_effort": any_value, "enable_thinking": any_value, "include_reasoning": equals(True),
    "continue_final_message": equals(False), "add_generation_prompt": equals(True), "chat_template_kwargs": empty
}  # fmt: skip
CHAT_NEUTRAL: Neutral = NEUTRAL | {
    "echo": equals(False), "best_of": equals(1), "add_special_tokens": equals(False), "parse_special": equals(False),
    "reasoning": has(effort=any_value, enabled=equals(True), max_tokens=no_value, exclude=equals(False)),
}  # fmt: skip
# Fields of chat completions that other routes do not have. `user` and `priority` are not among them: they change no answer.
CHATS_OWN: Neutral = {
    "n": equals(1), "stop": empty, "top_k": equals(0, -1), "min_p": equals(0), "min_tokens": equals(0),
    "presence_penalty": equals(0), "frequency_penalty": equals(0), "repetition_penalty": equals(1),
    "logit_bias": empty, "bad_words": empty, "stop_token_ids": empty, "allowed_token_ids": empty,
    "ignore_eos": equals(False), "include_stop_str_in_output": equals(False), "skip_special_tokens": equals(True),
    "max_tokens": no_value, "max_completion_tokens": no_value, "include_reasoning": equals(True),
    "logprobs": equals(False), "top_logprobs": equals(0), "prompt_logprobs": no_value,
    "return_token_ids": equals(False), "return_tokens_as_token_ids": equals(False),
    "response_format": equals({"type": "text"}), "structured_outputs": empty,
    "functions": empty, "function_call": equals("none"), "parallel_tool_calls": equals(True),
    "reasoning_effort": no_value, "enable_thinking": no_value,
    "continue_final_message": equals(False), "add_generation_prompt": equals(True),
    "chat_template_kwargs": empty,
}  # fmt: skip
MESSAGE_NEUTRAL: Neutral = {"function_call": no_value, "audio": no_value}
_ONE_REPLICA = "one replica computes the whole of an answer"
REASONS = {
    **{name: f"the field is {successor}" for name, successor in SUCCESSORS.items()},
    "suffix": "it continues texts, and has no format for text before and after a gap; write the model's own into the prompt",
    **dict.fromkeys(("use_beam_search", "early_stopping"), "it has no beam search; n and best_of give several answers"),
    "length_penalty": "it belongs to beam search",
    "best_of": "completions take it",
    "echo": "completions take it; continue_final_message continues a message",
    "add_special_tokens": "the chat template writes the control tokens of a chat",
    "logits_processors": "logit_bias, bad_words and allowed_token_ids change logits",
    "documents": "write them into a message",
    "prompt_embeds": "a prompt is text or token ids",
    "chat_template": "the server's own argument chat_template sets it for all requests",
    "top_logprobs": "log-probabilities are at /v1/chat/completions",
    "mcp_servers": "it calls no tools itself, only the client's are offered",
    "container": "it runs no tools of its own",
    "thread": "it stores no conversations: send all messages",
    "compaction": "it summarizes nothing: ask for a summary in a message",
    "truncate_prompt_tokens": "a prompt that does not fit is refused, never cut",
    "typical_p": "the samplers are temperature, min_p, top_k and top_p",
    "thinking_token_budget": "reasoning has no limit of its own: max_tokens counts it too",
    "include_reasoning": "the text of a completion has all that the model writes",
    "reasoning": "of its parts, chats take effort",
    "logprob_token_ids": "log-probabilities are those of the likeliest tokens; /v1/score and /v1/classify compare given ones",
    "vllm_xargs": "it has no extensions of requests",
    "watermarking": "no answer has a watermark",
    "repetition_detection": "no repetition ends an answer: frequency_penalty and repetition_penalty make them rare",
    "kv_transfer_params": _ONE_REPLICA, "ec_transfer_params": _ONE_REPLICA,
    "return_prompt_text": "return_token_ids gives the prompt's tokens, and /detokenize their text",
    "guided_whitespace_pattern": "JSON has at most one space, or a new line and its indentation, between its parts",
}  # fmt: skip
REASONS_ELSEWHERE = {
    **REASONS,
    **dict.fromkeys(CHATS_OWN, "it takes this field at /v1/chat/completions, not here"),
    "max_tokens": "the field of this API is max_output_tokens",
    "top_logprobs": REASONS["top_logprobs"],
    "reasoning": "at /v1/messages the field is output_config.effort",
}


def refuse_unsupported(
    fields: Mapping[str, object], neutral: Neutral, where: str = "", reasons: Mapping[str, str] = REASONS
) -> None:
    """Raises Unsupported for the first field whose value this server does not support. `where` prefixes its name."""
    for name, value in fields.items():
        if value is not None and name in neutral and not neutral[name](value) and value != _of_successor(name, fields):
            why = reasons.get(name, "GET /docs lists the fields that are")
            raise Unsupported(f"{where}{name}: not supported by this server: {why}", param=where + name)


def _of_successor(name: str, fields: Mapping[str, object]) -> object:
    first, _, part = SUCCESSORS.get(name, "").partition(".")
    value = fields.get(first)
    return value.get(part) if part and isinstance(value, Mapping) else value


class CheckedBody(Body):
    """Refuses a field of `neutral` that is no field of its own and has another value than a neutral one.

    The error has the field's place within this object.
    """

    neutral: ClassVar[Neutral] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.neutral = {name: test for name, test in cls.neutral.items() if name not in cls.model_fields}

    @model_validator(mode="before")
    @classmethod
    def _asks_for_what_is_supported(cls, given: Any) -> Any:
        if isinstance(given, dict):
            refuse_unsupported(given, cls.neutral, ".", REASONS_ELSEWHERE)
        return given
