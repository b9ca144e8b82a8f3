"""transformers' continuous batching, with random weights of a given shape: the peer of the offline batch of `gpu`."""

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from benchmarks.harness.workload import Request
from llama_core.model_config import ModelConfig


class ContinuousBatching:
    """A model that gets all requests of a batch at once and batches them by itself. Raises ImportError without transformers.

    num_finished: requests of the latest batch.
    """

    num_finished = 0

    def __init__(self, config: ModelConfig, max_seq_len: int, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

        described = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.hidden_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            max_position_embeddings=max_seq_len,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=False,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                self._model = LlamaForCausalLM(described).eval()  # its own random weights
        finally:
            torch.set_default_dtype(before)
        self._model.set_attn_implementation("sdpa")
        self._greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max_seq_len)

    def __enter__(self) -> "ContinuousBatching":
        """Start transformers' thread. One serves all batches: a second one that starts before the first has ended changes the
        model that both run."""
        self._stack = ExitStack()
        # Inference mode would forbid the thread to write to tensors that are made here.
        self._stack.enter_context(torch.no_grad())
        self._manager = self._stack.enter_context(
            self._model.continuous_batching_context_manager(generation_config=self._greedy, timeout=5)
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def seconds(self, requests: Sequence[Request], limit_s: float = float("inf")) -> float | None:
        """Seconds from the first request's arrival to the last one's end. None if the limit passes first; the requests are then
        cancelled. Raises RuntimeError if a request or transformers' thread fails."""
        manager, begin, generated = self._manager, time.perf_counter(), 0
        self.num_finished = 0
        running: set[str] = set()

        def cancelled_at_limit() -> bool:
            """Whether the limit has passed; then the running requests are cancelled, because leaving the context manager waits
            for them."""
            if time.perf_counter() - begin <= limit_s:
                return False
            for name in running:
                manager.cancel_request(name)
            return True

        for request in requests:
            name = manager.add_request(request.prompt, max_new_tokens=request.num_output, eos_token_id=-1)
            if name is None:
                raise RuntimeError("transformers takes no further requests")
            running.add(name)
            if cancelled_at_limit():
                return None
        while running:
            if cancelled_at_limit():
                return None
            # Not every version counts a request that failed as finished.
            while (result := manager.get_result(timeout=1)) is None or not (result.error or result.is_finished()):
                if not manager.is_running():
                    raise RuntimeError("transformers' generation thread has ended")
                if cancelled_at_limit():
                    return None
            if result.error is not None:
                raise RuntimeError(f"transformers: {result.error}")
            running.remove(result.request_id)
            generated += len(result.generated_tokens)
            self.num_finished += 1
        seconds = time.perf_counter() - begin
        assert generated == sum(request.num_output for request in requests), "every request gets what it asked for"
        return seconds
