"""Names of the fields of requests that other servers read, as their sources have them in November 2026, and older ones."""

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
_SGLANG: Final = {
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "cache_salt", "custom_logit_processor", "custom_params",
    "data_parallel_rank", "disagg_prefill_dp_rank", "ebnf", "extra_key", "frequency_penalty", "ignore_eos",
    "images_config", "logit_bias", "logprobs", "lora_path", "max_tokens", "min_p", "min_tokens", "model", "n",
    "ngram_corpus_id", "no_stop_trim", "presence_penalty", "priority", "regex", "repetition_penalty", "response_format",
    "return_cached_tokens_details", "return_hidden_states", "return_routed_experts", "return_token_ids", "rid",
    "routed_dp_rank", "routed_experts_start_len", "seed", "session_id", "session_params", "skip_special_tokens", "stop",
    "stop_regex", "stop_token_ids", "stream", "stream_options", "temperature", "top_k", "top_p", "user",
}  # fmt: skip
SGLANG_CHAT: Final = _SGLANG | {
    "chat_template_kwargs", "continue_final_message", "input_ids", "max_completion_tokens", "max_dynamic_patch",
    "messages", "min_dynamic_patch", "parallel_tool_calls", "reasoning", "reasoning_effort", "return_meta_info",
    "return_prompt_token_ids", "separate_reasoning", "stream_reasoning", "task", "tool_choice", "tools", "top_logprobs",
    "use_audio_in_video",
}  # fmt: skip
SGLANG_COMPLETION: Final = _SGLANG | {
    "best_of", "custom_labels", "echo", "json_schema", "prompt", "suffix",
}  # fmt: skip
_LLAMA_CPP: Final = {
    "adaptive_decay", "adaptive_target", "backend_sampling", "cache_prompt", "chat_format", "chat_parser",
    "continue_final_message", "dry_allowed_length", "dry_base", "dry_multiplier", "dry_penalty_last_n",
    "dry_sequence_breakers", "dynatemp_exponent", "dynatemp_range", "echo", "frequency_penalty", "generation_prompt",
    "grammar", "grammar_lazy", "grammar_triggers", "grammar_type", "id_slot", "ignore_eos", "image_data", "json_schema",
    "logit_bias", "logprobs", "lora", "max_completion_tokens", "max_tokens", "min_keep", "min_p", "mirostat",
    "mirostat_eta", "mirostat_tau", "n", "n_cache_reuse", "n_cmpl", "n_discard", "n_indent", "n_keep", "n_predict",
    "n_probs", "parse_tool_calls", "penalize_nl", "post_sampling_probs", "presence_penalty", "preserved_tokens",
    "reasoning_budget_end_tag", "reasoning_budget_end_tags", "reasoning_budget_message", "reasoning_budget_start_tag",
    "reasoning_budget_tokens", "reasoning_control", "reasoning_format", "repeat_last_n", "repeat_penalty",
    "response_fields", "return_progress", "return_tokens", "samplers", "seed", "sse_ping_interval", "stop", "stream",
    "stream_options", "t_max_predict_ms", "t_max_prompt_ms", "temperature", "thinking_budget_tokens",
    "timings_per_token", "top_k", "top_n_sigma", "top_p", "typical_p", "verbose", "xtc_probability", "xtc_threshold",
}  # fmt: skip
LLAMA_CPP_CHAT: Final = _LLAMA_CPP | {
    "add_generation_prompt", "chat_template_kwargs", "messages", "parallel_tool_calls", "response_format",
    "tool_choice", "tools", "top_logprobs",
}  # fmt: skip
LLAMA_CPP_COMPLETION: Final = _LLAMA_CPP | {
    "best_of", "prompt", "suffix",
}  # fmt: skip
