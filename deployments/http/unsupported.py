"""The fields of OpenAI, Anthropic and vLLM that this server does not support, and the values of them that change nothing."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from deployments.http.errors import Unsupported
from deployments.http.field_types import Body

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
    """Of fields that concern the sender's account, caches and records, never the answer."""
    return True


empty = equals([], {}, "", False)
no_value = equals()

NEUTRAL: Neutral = {
    "length_penalty": equals(1), "typical_p": equals(1), "suffix": equals(""), "use_beam_search": equals(False),
    "modalities": equals(["text"]), "audio": no_value, "prediction": no_value, "moderation": no_value,
    "verbosity": equals("medium"), "web_search_options": no_value,
    "prompt_embeds": no_value, "truncate_prompt_tokens": no_value,
    "logits_processors": empty, "chat_template": no_value,
    "documents": empty, "mirostat": equals(0), "dry_multiplier": equals(0), "xtc_probability": equals(0),
    "metadata": any_value, "store": any_value, "safety_identifier": any_value,
    "prompt_cache_key": any_value, "prompt_cache_options": any_value, "prompt_cache_retention": any_value,
}  # fmt: skip
COMPLETION_NEUTRAL: Neutral = NEUTRAL | {
    "tools": empty, "tool_choice": equals("none"), "functions": empty, "function_call": equals("none"),
    "reasoning_effort": equals("none"),
    "continue_final_message": equals(False), "add_generation_prompt": equals(True), "chat_template_kwargs": empty
}  # fmt: skip
CHAT_NEUTRAL: Neutral = NEUTRAL | {
    "echo": equals(False), "best_of": equals(1), "add_special_tokens": equals(False), "parse_special": equals(False)
}  # fmt: skip
# Fields of chat completions that other routes do not have. `user` and `priority` are not among them: they change no answer.
CHATS_OWN: Neutral = {
    "n": equals(1), "stop": empty, "top_k": equals(0, -1), "min_p": equals(0), "min_tokens": equals(0),
    "presence_penalty": equals(0), "frequency_penalty": equals(0), "repetition_penalty": equals(1),
    "logit_bias": empty, "bad_words": empty, "stop_token_ids": empty, "allowed_token_ids": empty,
    "ignore_eos": equals(False), "include_stop_str_in_output": equals(False), "skip_special_tokens": equals(True),
    "max_tokens": no_value, "max_completion_tokens": no_value,
    "logprobs": equals(False), "top_logprobs": equals(0), "prompt_logprobs": no_value,
    "return_token_ids": equals(False), "return_tokens_as_token_ids": equals(False),
    "response_format": equals({"type": "text"}), "structured_outputs": empty, "guided_json": equals(False),
    "guided_regex": no_value, "guided_choice": no_value, "guided_grammar": no_value, "grammar": no_value,
    "json_schema": no_value,
    "functions": empty, "function_call": equals("none"), "parallel_tool_calls": equals(True),
    "reasoning_effort": no_value, "continue_final_message": equals(False), "add_generation_prompt": equals(True),
    "chat_template_kwargs": empty,
}  # fmt: skip
MESSAGE_NEUTRAL: Neutral = {"function_call": no_value, "audio": no_value}
REASONS = {
    "suffix": "it continues texts, and has no format for text before and after a gap; write the model's own into the prompt",
    "use_beam_search": "every answer is sampled; n and best_of give several",
    "length_penalty": "it belongs to beam search",
    "chat_template": "the server's own argument chat_template sets it for all requests",
    "top_logprobs": "log-probabilities are at /v1/chat/completions",
    "mcp_servers": "it calls no tools itself, only the client's are offered",
    "container": "it runs no tools of its own",
    "thread": "it stores no conversations: send all messages",
    "compaction": "it summarizes nothing: ask for a summary in a message",
    "truncate_prompt_tokens": "a prompt that does not fit is refused, never cut",
}
REASONS_ELSEWHERE = {
    **dict.fromkeys(CHATS_OWN, "it takes this field at /v1/chat/completions, not here"),
    "max_tokens": "the field of this API is max_output_tokens",
    **REASONS,
}


def refuse_unsupported(
    fields: Mapping[str, object], neutral: Neutral, where: str = "", reasons: Mapping[str, str] = REASONS
) -> None:
    """Raises Unsupported for the first field whose value this server does not support. `where` prefixes its name."""
    for name, value in fields.items():
        if value is not None and name in neutral and not neutral[name](value):
            why = reasons.get(name, "docs/http.md lists the fields that are")
            raise Unsupported(f"{where}{name}: not supported by this server: {why}", param=where + name)


class CheckedBody(Body):
    """Refuses a field of `neutral` that is no field of its own and has another value than a neutral one.

    The error has the field's place within this object.
    """

    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _asks_for_what_is_supported(cls, given: Any) -> Any:
        if isinstance(given, dict):
            others = {name: value for name, value in given.items() if name not in cls.model_fields}
            refuse_unsupported(others, cls.neutral, ".", REASONS_ELSEWHERE)
        return given
