"""The fields of OpenAI and vLLM that this server does not support, and the values of them that change nothing."""

from collections.abc import Callable, Mapping

from deployments.http.errors import Unsupported


def _is(*neutral: object) -> Callable[[object], bool]:
    """Tests whether a value equals one of these and is of its type: JSON's false is not 0."""
    return lambda value: any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


_empty = _is([], {}, "", False)
_none_at_all = _is()

NEUTRAL: dict[str, Callable[[object], bool]] = {
    # field -> test for values that do not change the answer. Every other value is refused, never ignored.
    "length_penalty": _is(1), "typical_p": _is(1), "suffix": _is(""), "use_beam_search": _is(False),
    "modalities": _is(["text"]), "audio": _none_at_all, "prediction": _none_at_all,
    "verbosity": _is("medium"), "web_search_options": _none_at_all,
    "prompt_embeds": _none_at_all, "truncate_prompt_tokens": _none_at_all,
    "logits_processors": _empty, "chat_template": _none_at_all,
    "documents": _empty, "mirostat": _is(0), "dry_multiplier": _is(0), "xtc_probability": _is(0),
}  # fmt: skip
REASONS = {
    "suffix": "it continues texts, and has no format for text before and after a gap; write the model's own into the prompt",
    "use_beam_search": "every answer is sampled; n and best_of give several",
    "length_penalty": "it belongs to beam search",
    "chat_template": "the server's own argument chat_template sets it for all requests",
    "truncate_prompt_tokens": "a prompt that does not fit is refused, never cut",
}
COMPLETION_NEUTRAL = NEUTRAL | {
    "tools": _empty, "tool_choice": _is("none"), "functions": _empty, "function_call": _is("none"),
    "reasoning_effort": _is("none"),
    "continue_final_message": _is(False), "add_generation_prompt": _is(True), "chat_template_kwargs": _empty
}  # fmt: skip
CHAT_NEUTRAL = NEUTRAL | {
    "echo": _is(False), "best_of": _is(1), "add_special_tokens": _is(False), "parse_special": _is(False)
}  # fmt: skip
MESSAGE_NEUTRAL = {"function_call": _none_at_all, "audio": _none_at_all}


def refuse_unsupported(
    fields: Mapping[str, object], neutral: Mapping[str, Callable[[object], bool]], where: str = ""
) -> None:
    """Raises Unsupported for the first field whose value this server does not support. `where` prefixes its name."""
    for name, value in fields.items():
        if value is not None and name in neutral and not neutral[name](value):
            why = REASONS.get(name, "docs/http.md lists the fields that are")
            raise Unsupported(f"{where}{name}: not supported by this server: {why}", param=where + name)
