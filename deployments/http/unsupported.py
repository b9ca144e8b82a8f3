"""The fields of OpenAI, Anthropic, vLLM, SGLang and llama.cpp that this server does not support, and the values of them that
change nothing."""

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


def at_most(most: float) -> Test:
    """Tests whether a value is a number up to `most`."""
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value <= most


def any_value(_: object) -> bool:
    """Of fields that never change the answer."""
    return True


empty = equals([], {}, "", False)
no_value = equals()

# Fields whose values never change the text, the tokens or their log-probabilities.
HARMLESS = (
    # The sender's account, caches, records and names of requests.
    "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "cache_salt", "cache_prompt", "n_cache_reuse", "id_slot", "extra_key", "session_id", "request_id", "rid", "custom_labels",
    # Where and how an answer is computed and sent.
    "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "ngram_corpus_id", "backend_sampling",
    "guided_decoding_backend", "stream_interval", "stream_reasoning", "sse_ping_interval",
    # Hints, which OpenAI's models follow as far as they like.
    "verbosity", "web_search_options",
    # Reports beside the answer.
    "verbose", "timings_per_token", "return_progress", "return_cached_tokens_details", "return_token_offsets",
    "return_mm_kwargs", "routed_experts_prompt_start", "routed_experts_start_len",
    # Images, audio and video, which no prompt has here.
    "media_io_kwargs", "mm_processor_kwargs", "images_config", "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video",
    # Settings of features that are off, which act beside a field that is refused below, or on a prompt that would be cut.
    "truncation_side", "n_keep", "n_discard", "dynatemp_exponent", "xtc_threshold", "mirostat_tau", "mirostat_eta", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "adaptive_decay", "preserved_tokens", "grammar_type",
    "reasoning_budget_start_tag", "reasoning_budget_end_tag", "reasoning_budget_end_tags", "reasoning_budget_message",
    # Names of control tokens have no spaces around them, as with vLLM's fast tokenizers.
    "spaces_between_special_tokens",
    # Read by single models' templates, and no longer read by llama.cpp.
    "task", "penalize_nl",
)  # fmt: skip
NEUTRAL: Neutral = dict.fromkeys(HARMLESS, any_value) | {
    "length_penalty": equals(1), "typical_p": equals(1), "suffix": equals(""), "use_beam_search": equals(False),
    "early_stopping": equals(False),
    "modalities": equals(["text"]), "audio": no_value, "prediction": no_value, "moderation": no_value,
    "prompt_embeds": no_value, "truncate_prompt_tokens": no_value,
    "logits_processors": empty, "chat_template": no_value,
    "documents": empty, "mirostat": equals(0), "dry_multiplier": equals(0), "xtc_probability": equals(0),
    # vLLM.
    "thinking_token_budget": equals(-1), "logprob_token_ids": empty, "vllm_xargs": empty, "watermarking": equals(False),
    "repetition_detection": has(max_pattern_size=equals(0)), "max_repetition_pattern_size": equals(0),
    "min_repetition_pattern_size": equals(0), "kv_transfer_params": empty, "ec_transfer_params": empty,
    "return_prompt_text": equals(False), "guided_whitespace_pattern": no_value, "structural_tag": no_value,
    # SGLang.
    "stop_regex": empty, "no_stop_trim": equals(False), "min_new_tokens": equals(0),
    "lora_path": empty, "session_params": empty, "custom_params": empty, "custom_logit_processor": empty, "input_ids": no_value,
    "separate_reasoning": equals(True), "return_hidden_states": equals(False), "return_routed_experts": equals(False),
    "return_prompt_token_ids": equals(False), "return_meta_info": equals(False), "enable_thinking": no_value,
    "bootstrap_host": no_value, "bootstrap_port": no_value, "bootstrap_room": no_value,
    # llama.cpp.
    "dynatemp_range": equals(0), "top_n_sigma": at_most(0), "typ_p": equals(1), "adaptive_target": equals(-1),
    "samplers": empty, "min_keep": equals(0), "n_indent": equals(0), "n_cmpl": equals(1),
    "n_probs": equals(0), "post_sampling_probs": equals(False), "return_tokens": equals(False), "response_fields": empty,
    "t_max_predict_ms": at_most(0), "t_max_prompt_ms": at_most(0), "lora": empty, "image_data": empty,
    "grammar_lazy": equals(False), "grammar_triggers": empty, "chat_format": no_value, "chat_parser": no_value,
    "generation_prompt": no_value, "parse_tool_calls": equals(True), "reasoning_format": equals("auto", "deepseek"),
    "reasoning_control": equals(False), "reasoning_budget_tokens": equals(-1), "thinking_budget_tokens": equals(-1),
}  # fmt: skip
COMPLETION_NEUTRAL: Neutral = NEUTRAL | {
    "tools": empty, "tool_choice": equals("none"), "functions": empty, "function_call": equals("none"),
    "reasoning_effort": equals("none"), "include_reasoning": equals(True),
    "continue_final_message": equals(False), "add_generation_prompt": equals(True), "chat_template_kwargs": empty
}  # fmt: skip
CHAT_NEUTRAL: Neutral = NEUTRAL | {
    "echo": equals(False), "best_of": equals(1), "add_special_tokens": equals(False), "parse_special": equals(False),
    "reasoning": has(effort=no_value, enabled=equals(True), max_tokens=no_value, exclude=equals(False)),
}  # fmt: skip
# Fields of chat completions that other routes do not have. `user` and `priority` are not among them: they change no answer.
CHATS_OWN: Neutral = {
    "n": equals(1), "stop": empty, "top_k": equals(0, -1), "min_p": equals(0), "min_tokens": equals(0),
    "presence_penalty": equals(0), "frequency_penalty": equals(0), "repetition_penalty": equals(1),
    "logit_bias": empty, "bad_words": empty, "stop_token_ids": empty, "allowed_token_ids": empty,
    "ignore_eos": equals(False), "include_stop_str_in_output": equals(False), "skip_special_tokens": equals(True),
    "max_tokens": no_value, "max_completion_tokens": no_value, "n_predict": no_value, "max_new_tokens": no_value,
    "repeat_penalty": equals(1), "repeat_last_n": any_value, "include_reasoning": equals(True),
    "logprobs": equals(False), "top_logprobs": equals(0), "prompt_logprobs": no_value,
    "return_token_ids": equals(False), "return_tokens_as_token_ids": equals(False),
    "response_format": equals({"type": "text"}), "structured_outputs": empty, "guided_json": no_value,
    "guided_regex": no_value, "guided_choice": no_value, "guided_grammar": no_value, "grammar": no_value,
    "json_schema": no_value, "regex": no_value, "ebnf": no_value,
    "functions": empty, "function_call": equals("none"), "parallel_tool_calls": equals(True),
    "reasoning_effort": no_value, "continue_final_message": equals(False), "add_generation_prompt": equals(True),
    "chat_template_kwargs": empty,
}  # fmt: skip
MESSAGE_NEUTRAL: Neutral = {"function_call": no_value, "audio": no_value}
_SAMPLERS = "the samplers are temperature, min_p, top_k and top_p"
_BUDGET = "reasoning has no limit of its own: max_tokens counts it too"
_REPETITIONS = "no repetition ends an answer: frequency_penalty and repetition_penalty make them rare"
_ONE_REPLICA = "one replica computes the whole of an answer"
_EXTENSIONS = "it has no extensions of requests"
_ADAPTERS = "it serves one model, without adapters"
_LAZY_GRAMMAR = "structural_tag in response_format constrains what follows a trigger"
_OWN_PARSER = "the model's chat template says how answers are parsed"
_THINKS_BY_TEMPLATE = "chat_template_kwargs sets it, for templates that read it"
REASONS = {
    "suffix": "it continues texts, and has no format for text before and after a gap; write the model's own into the prompt",
    **dict.fromkeys(("use_beam_search", "early_stopping"), "it has no beam search; n and best_of give several answers"),
    "length_penalty": "it belongs to beam search",
    "best_of": "completions take it",
    "echo": "completions take it; continue_final_message continues a message",
    "add_special_tokens": "the chat template writes the control tokens of a chat",
    "logits_processors": "logit_bias, bad_words and allowed_token_ids change logits",
    "documents": "write them into a message",
    "prompt_embeds": "a prompt is text or token ids",
    "input_ids": "/v1/completions takes token ids as prompt",
    "chat_template": "the server's own argument chat_template sets it for all requests",
    "top_logprobs": "log-probabilities are at /v1/chat/completions",
    "mcp_servers": "it calls no tools itself, only the client's are offered",
    "container": "it runs no tools of its own",
    "thread": "it stores no conversations: send all messages",
    "compaction": "it summarizes nothing: ask for a summary in a message",
    "truncate_prompt_tokens": "a prompt that does not fit is refused, never cut",
    **dict.fromkeys(
        ("typical_p", "typ_p", "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "top_n_sigma",
         "adaptive_target", "min_keep"), _SAMPLERS
    ),
    "samplers": "their order is fixed: penalties, temperature, min_p, top_k, top_p",
    "repeat_last_n": "penalties count all tokens: send -1",
    "thinking_token_budget": _BUDGET, "reasoning_budget_tokens": _BUDGET, "thinking_budget_tokens": _BUDGET,
    "reasoning_control": _BUDGET,
    "include_reasoning": "the text of a completion has all that the model writes",
    "reasoning": "the field is reasoning_effort",
    "enable_thinking": _THINKS_BY_TEMPLATE,
    "separate_reasoning": "the reasoning of a chat is in reasoning_content",
    "reasoning_format": "the reasoning of a chat is in reasoning_content",
    "logprob_token_ids": "log-probabilities are those of the likeliest tokens; /v1/score and /v1/classify compare given ones",
    "n_probs": "the field is logprobs, in chats with top_logprobs",
    "post_sampling_probs": "log-probabilities are the model's own, before any sampler",
    "vllm_xargs": _EXTENSIONS, "custom_params": _EXTENSIONS, "custom_logit_processor": _EXTENSIONS,
    "watermarking": "no answer has a watermark",
    "repetition_detection": _REPETITIONS, "max_repetition_pattern_size": _REPETITIONS,
    "min_repetition_pattern_size": _REPETITIONS,
    **dict.fromkeys(
        ("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"), _ONE_REPLICA
    ),
    "return_prompt_text": "return_token_ids gives the prompt's tokens, and /detokenize their text",
    "return_prompt_token_ids": "the field is return_token_ids",
    "return_tokens": "the field is return_token_ids",
    "return_hidden_states": "answers have no hidden states",
    "return_routed_experts": "the models have no experts",
    "return_meta_info": "usage and finish_reason have what there is",
    "response_fields": "answers have all of their fields",
    "guided_whitespace_pattern": "JSON has at most one space, or a new line and its indentation, between its parts",
    "structural_tag": "its place is structured_outputs.structural_tag or response_format",
    "stop_regex": "stop takes strings, and structured_outputs.regex ends a text where its pattern ends",
    "no_stop_trim": "the field is include_stop_str_in_output",
    "min_new_tokens": "the field is min_tokens",
    "n_cmpl": "the field is n",
    "n_indent": "structured_outputs.regex constrains the lines of a text",
    "t_max_predict_ms": "the header x-request-timeout-seconds limits the time",
    "t_max_prompt_ms": "the header x-request-timeout-seconds limits the time",
    "lora_path": _ADAPTERS, "lora": _ADAPTERS,
    "session_params": "it stores no conversations: send all messages",
    "image_data": "a prompt is text",
    "grammar_lazy": _LAZY_GRAMMAR, "grammar_triggers": _LAZY_GRAMMAR,
    "chat_format": _OWN_PARSER, "chat_parser": _OWN_PARSER, "generation_prompt": _OWN_PARSER, "parse_tool_calls": _OWN_PARSER,
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
        if value is not None and name in neutral and not neutral[name](value):
            why = reasons.get(name, "GET /docs lists the fields that are")
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
