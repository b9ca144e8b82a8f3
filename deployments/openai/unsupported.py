"""The fields of OpenAI, Anthropic and vLLM that this server does not support, and the values of them that change nothing."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from pydantic import model_validator

from deployments.openai.errors import Unsupported
from deployments.openai.field_types import Body

ANY: Final = None  # of fields that never change the answer
EMPTY: Final[tuple[object, ...]] = ([], {}, "", False)
# Field -> the values that do not change the answer, or of an object the same for its fields. Others are refused, never ignored.
Neutral = dict[str, Any]


def is_neutral(value: object, neutral: Any) -> bool:
    """Whether a value is one of `neutral` and of its type: JSON's false is not 0."""
    if isinstance(neutral, dict):
        return isinstance(value, dict) and all(
            value.get(name) is None or is_neutral(value[name], each) for name, each in neutral.items()
        )
    if callable(neutral):
        return bool(neutral(value))
    return neutral is ANY or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


# vLLM's removed names and other servers' names of fields: refused with the name of the field, ignored beside it with its value.
SUCCESSORS = {
    "guided_json": "structured_outputs.json", "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice", "guided_grammar": "structured_outputs.grammar",
    "structural_tag": "structured_outputs.structural_tag",
    "json_schema": "structured_outputs.json", "regex": "structured_outputs.regex", "grammar": "structured_outputs.grammar",
    "ebnf": "structured_outputs.grammar", "n_predict": "max_tokens", "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens", "repeat_penalty": "repetition_penalty", "n_cmpl": "n",
}  # fmt: skip
NEUTRAL: Neutral = dict.fromkeys(SUCCESSORS, EMPTY) | {
    "length_penalty": (1,), "typical_p": (1,), "suffix": ("",), "use_beam_search": (False,), "early_stopping": (False,),
    "modalities": (["text"],), "audio": (), "prediction": ANY, "moderation": (), "prompt_embeds": (), "chat_template": (),
    "truncate_prompt_tokens": (), "logits_processors": EMPTY, "documents": EMPTY, "thinking_token_budget": (-1,),
    "logprob_token_ids": EMPTY, "vllm_xargs": EMPTY, "watermarking": (False,), "kv_transfer_params": EMPTY,
    "repetition_detection": {"max_pattern_size": (0,)}, "ec_transfer_params": EMPTY, "return_prompt_text": (False,),
    "guided_whitespace_pattern": (),
}  # fmt: skip
# Fields of chats that make the prompt.
TEMPLATE_NEUTRAL: Neutral = {
    "continue_final_message": (False,), "add_generation_prompt": (True,), "chat_template_kwargs": EMPTY,
}  # fmt: skip
_LEGACY: Final = {"functions": EMPTY, "function_call": ("none",), "include_reasoning": (True,)}
COMPLETION_NEUTRAL: Neutral = NEUTRAL | TEMPLATE_NEUTRAL | _LEGACY | {
    "tools": EMPTY, "tool_choice": ("none",), "reasoning_effort": ANY, "enable_thinking": ANY,
}  # fmt: skip
CHAT_NEUTRAL: Neutral = NEUTRAL | {
    "echo": (False,), "best_of": (1,), "add_special_tokens": (False,), "parse_special": (False,),
    "reasoning": {"effort": ANY, "enabled": (True,), "max_tokens": (), "exclude": (False,)},
}  # fmt: skip
# Fields of chat completions that other routes do not have. `user` and `priority` are not among them: they change no answer.
CHATS_OWN: Neutral = TEMPLATE_NEUTRAL | _LEGACY | {
    "n": (1,), "stop": EMPTY, "top_k": (0, -1), "min_p": (0,), "min_tokens": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": EMPTY, "bad_words": EMPTY, "stop_token_ids": EMPTY,
    "allowed_token_ids": EMPTY, "ignore_eos": (False,), "include_stop_str_in_output": (False,), "skip_special_tokens": (True,),
    "max_tokens": (), "max_completion_tokens": (), "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "response_format": ({"type": "text"},),
    "structured_outputs": EMPTY, "parallel_tool_calls": (True,), "reasoning_effort": (), "enable_thinking": (),
}  # fmt: skip
MESSAGE_NEUTRAL: Neutral = {"function_call": (), "audio": ()}
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
        if value is None or name not in neutral or is_neutral(value, neutral[name]):
            continue
        if value != _of_successor(name, fields):
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
