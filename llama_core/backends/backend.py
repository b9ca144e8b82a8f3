"""The Protocol of a backend, which computes the rows of a step: torch anywhere, C++ on CPU cores, CUDA graphs on GPUs."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple, Protocol

import torch

from llama_core.grammar.masks import GrammarMasks
from llama_core.scheduling.request import TokenLogprob
from llama_core.scheduling.step import Pending, Row
from llama_core.weights.adapter import LowRank

NOT_FINITE: Final = -1
NOTHING_ALLOWED: Final = -2
# Rows of logits that exist at once for prompt logprobs: all rows of a long prompt would take gigabytes.
LOGITS_AT_A_TIME: Final = 64


class Sampled(NamedTuple):
    """The tokens that a step's rows sampled, in order.

    non_finite, refused: indices of tokens that are placeholders, because their logits were not finite, or no token was allowed.
    logprobs: reads those of each token, with the MAX_TOP_LOGPROBS most likely. The thread that starts steps calls it, before
    its next step. None where the step was started without `keep_logits`, or where the backend leaves them to
    `logits_of_samples`. mask_wait_s: seconds that the sampling waited for masks; None where the backend does not measure it.
    """

    tokens: list[int]
    non_finite: list[int]
    refused: list[int]
    logprobs: Callable[[], list[TokenLogprob]] | None = None
    mask_wait_s: float | None = None

    @classmethod
    def of(cls, tokens: list[int], mask_wait_s: float | None = None) -> "Sampled":
        """tokens: of each sample, or NOT_FINITE or NOTHING_ALLOWED in place of a token."""
        if min(tokens, default=0) >= 0:
            return cls(tokens, [], [], mask_wait_s=mask_wait_s)
        return cls(
            [max(0, token) for token in tokens],
            [i for i, token in enumerate(tokens) if token == NOT_FINITE],
            [i for i, token in enumerate(tokens) if token == NOTHING_ALLOWED],
            mask_wait_s=mask_wait_s,
        )


class Backend(Protocol):
    """One rank's weights, cache and buffers. The runner owns the slots: a backend reads them, and writes sampled tokens.

    name: the backend and its instructions, for logs. weight_bytes: of this rank in memory. working_bytes: memory of a step
    beside weights and cache. cache_block_bytes: keys and values of one block in all layers. seconds_waited: for the
    other ranks and, on CPUs, for masks, in all steps whose results were read; a backend may count the transfers of collectives
    too. None if unknown. seconds_sampled: in sampling, in the same steps; None if unknown.

    Each backend has a function `step_bytes`, which states working_bytes before the backend is made (`StepBytes`).
    """

    @property
    def name(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def working_bytes(self) -> int: ...
    @property
    def cache_block_bytes(self) -> int: ...
    @property
    def seconds_waited(self) -> float | None: ...
    @property
    def seconds_sampled(self) -> float | None: ...

    def unallocated_bytes(self, max_seq_len: int) -> int:
        """Of the working memory, what is not allocated yet when the backend is made, with sequences up to `max_seq_len`."""

    def allocate_cache(self, num_blocks: int) -> None: ...

    def load_adapter(self, place: int, pairs: Iterable[LowRank]) -> None:
        """Hold this rank's part of an adapter at a place, from 1 to max_loras, for the steps that start after this.
        `SlotInit.adapter_place` says which adapter a slot's rows have."""

    def start(self, rows: Seq[Row], *, keep_logits: bool, masks: GrammarMasks | None = None) -> Pending[Sampled]:
        """Compute the rows, sample, and store the sampled tokens as input of the next step. Every rank calls it with the same
        rows. keep_logits: the result has logprobs, or a call of `logits_of_samples` may follow. masks: on rank 0, which samples
        for all; None where no row has a grammar.

        The next step may start before this one's result is read, unless its logits are asked for. Any thread may read the
        result of a step whose samples are queued.
        """

    def queue_samples(self) -> None:
        """Queue the sampling of the latest step if it is not queued yet, because the step has masks. Blocks until these masks
        are done. `start` calls it before it queues a step. Does nothing on backends that sample in `start`."""

    def logits_of_samples(self, samples: Seq[int]) -> torch.Tensor:
        """float32 [len(samples), vocab] of these samples of the latest step, on every rank."""

    def logits_of_tokens(self, tokens: range) -> torch.Tensor:
        """float32 [len(tokens), vocab] after these tokens of the latest step, counted from its first, on every rank.

        Overwrites the logits of the samples.
        """

    def hidden_states_of_tokens(self, tokens: range) -> torch.Tensor:
        """float32 [len(tokens), dim] of these tokens of the latest step, counted from its first, after the final norm."""
