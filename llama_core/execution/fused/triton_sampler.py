"""`sampler.Sampler` in Triton. All its memory exists before a step: kernels leave their results for each other in place."""

import torch

from llama_core.errors import ConfigError
from llama_core.execution.fused import logit_kernels, logprob_kernels, sampling_kernels
from llama_core.execution.fused.logprob_kernels import LogprobBuffers
from llama_core.execution.fused.sampler import Mode, SamplingState
from llama_core.execution.fused.sampling_kernels import SamplingBuffers
from llama_core.execution.fused.step_plan import SampleTensors


class TritonSampler:
    """Implements `sampler.Sampler` for up to `max_samples` rows of `vocab` logits."""

    def __init__(self, state: SamplingState, max_samples: int, vocab: int) -> None:
        """Raises ConfigError if the sums of so large a vocabulary would overflow."""
        if vocab > sampling_kernels.MAX_VOCAB:
            raise ConfigError(
                f"a vocabulary of {vocab} tokens is larger than {sampling_kernels.MAX_VOCAB}: give backend: torch",
                param="backend",
            )
        device = state.tokens.device
        self._state = state
        self._buffers = SamplingBuffers(max_samples, vocab, device)
        self._logprobs = LogprobBuffers(max_samples, vocab, device)

    @property
    def nbytes(self) -> int:
        return self._buffers.nbytes + self._logprobs.nbytes

    def sample(self, logits: torch.Tensor, samples: SampleTensors, mode: Mode) -> torch.Tensor:
        state = self._state
        is_edited = mode in ("ruled", "masked")
        if is_edited:
            logit_kernels.edit(
                logits,
                state.sampling,
                samples.slots,
                samples.positions,
                state.tokens,
                state.rules,
                state.mask_indices if mode == "masked" else None,
                state.masks,
                self._buffers,
            )
        return sampling_kernels.sample(
            logits,
            state.sampling,
            samples.slots,
            samples.positions,
            self._buffers,
            is_greedy=mode == "greedy",
            is_edited=is_edited,
        )

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return logprob_kernels.logprobs(logits, tokens, self._logprobs)
