"""Names of the fields of requests that vLLM reads, as its source has them in November 2026, and older ones."""

from typing import Final

_VLLM: Final = {
    "add_special_tokens", "allowed_token_ids", "bad_words", "best_of", "cache_salt", "early_stopping",
    "ec_transfer_params", "echo", "frequency_penalty", "guided_choice", "guided_decoding_backend", "guided_grammar",
    "guided_json", "guided_regex", "guided_whitespace_pattern", "ignore_eos", "include_stop_str_in_output",
    "kv_transfer_params", "length_penalty", "logit_bias", "logits_processors", "logprob_token_ids", "logprobs",
    "max_tokens", "min_p", "min_tokens", "model", "n", "presence_penalty", "priority", "prompt_logprobs",
    "repetition_detection", "repetition_penalty", "request_id", "response_format", "return_mm_kwargs",
    "return_token_ids", "return_token_offsets", "return_tokens_as_token_ids", "routed_experts_prompt_start", "seed",
    "session_id", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids", "stream",
    "stream_interval", "stream_options", "structural_tag", "structured_outputs", "temperature", "thinking_token_budget",
    "top_k", "top_p", "truncate_prompt_tokens", "truncation_side", "use_beam_search", "user", "vllm_xargs",
    "watermarking",
}  # fmt: skip
VLLM_CHAT: Final = _VLLM | {
    "add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message", "documents",
    "include_reasoning", "max_completion_tokens", "media_io_kwargs", "messages", "mm_processor_kwargs",
    "parallel_tool_calls", "reasoning_effort", "return_prompt_text", "tool_choice", "tools", "top_logprobs",
}  # fmt: skip
VLLM_COMPLETION: Final = _VLLM | {
    "prompt", "prompt_embeds", "suffix",
}  # fmt: skip
# Fields whose values never change the text, the tokens or their log-probabilities: ignored, as unknown ones are.
HARMLESS: Final = {
    "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "cache_salt", "session_id", "request_id", "guided_decoding_backend", "stream_interval", "verbosity",
    "web_search_options", "return_token_offsets", "return_mm_kwargs", "routed_experts_prompt_start", "media_io_kwargs",
    "mm_processor_kwargs", "truncation_side", "spaces_between_special_tokens",
}  # fmt: skip
