"""The end of a step on a GPU: logits, and sampled tokens, which become the next step's inputs on the device."""

from bisect import bisect_left
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from functools import partial
from typing import Literal, get_args

import torch

from llama_core.backends.fused.buffers import DeviceSlots, MaskBuffers, Prefixes, StepBuffers
from llama_core.backends.fused.device import StepDevice, Work
from llama_core.backends.fused.model import FusedTransformer
from llama_core.backends.fused.ops import NUM_SUMS, StepClock
from llama_core.backends.fused.sampling.sampler import Mode, SamplingState
from llama_core.backends.fused.step_plan import StepPlan, bucket_sizes
from llama_core.config import EngineConfig
from llama_core.grammar.masks import GrammarMasks
from llama_core.scheduling.sampling_params import MAX_TOP_LOGPROBS

# What is captured for each number of samples.
Part = Mode | Literal["logprobs"]


class SamplingHead:
    """Samples the tokens that a `StepPlan` names after the hidden states of the step. All ranks sample the same tokens.

    logits: float32 [samples, vocab] of the latest step. clock: of all parts of a step.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: FusedTransformer,
        slots: DeviceSlots,
        device: StepDevice,
        buffers: StepBuffers,
        hidden_states: torch.Tensor,
        turns: int,
    ) -> None:
        """turns: the most steps whose results may be unread, each with a mask buffer of its own."""
        self._model = model
        self._slots = slots
        self._device = device
        self._buffers = buffers
        self._hidden_states = hidden_states
        rows, vocab = config.max_step_samples, config.vocab_size
        self._buckets = bucket_sizes(rows)
        self._graphs: dict[tuple[int, Part], Work] = {}
        self._masks = MaskBuffers(rows, vocab, turns, device)
        state = SamplingState(slots.tokens, slots.sampling, slots.rule_words, self._masks.indices, self._masks.masks)
        self._sampler = model.ops.sampler(state, rows, vocab)
        # Graphs write to these tensors, so they stay in place.
        torch_device = device.torch_device
        self.logits = torch.zeros((rows, vocab), dtype=torch.float32, device=torch_device)
        self._results = torch.zeros(NUM_SUMS + rows, dtype=torch.int64, device=torch_device)
        self._result_parts = Prefixes(self._results)
        self._sampled = self._results[NUM_SUMS:]
        self.clock = StepClock(model.ops, self._results[:NUM_SUMS])
        self.num_logprobs = 1 + min(MAX_TOP_LOGPROBS, vocab)
        self._logprobs = torch.zeros((rows, self.num_logprobs), dtype=torch.int64, device=torch_device)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that exist before the first step."""
        results = self.logits.nbytes + self._results.nbytes + self._logprobs.nbytes
        return results + self._sampler.nbytes + self._masks.nbytes

    @property
    def works(self) -> list[Work]:
        """The work of each graph to capture."""
        return [self._work(bucket, part) for bucket, part in self._variants]

    def capture(self) -> None:
        """Capture a graph for each bucket and mode. Raises RuntimeError where a head cannot be captured."""
        for variant, work in zip(self._variants, self.works, strict=True):
            self._graphs[variant] = self._device.capture(work)

    def release_graphs(self) -> None:
        self._graphs.clear()

    def start(
        self, turn: int, plan: StepPlan, masks: GrammarMasks | None, *, wants_logprobs: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queue the sampling of the step whose inputs were sent. Blocks until `masks` are done.

        Returns two tensors of the device, valid until the next step's: int64 [NUM_SUMS + S], the clock's sums and the tokens,
        NOT_FINITE or NOTHING_ALLOWED where there is none; and int64 [S, 1 + n] (`TorchSampler.logprobs`), None where no row
        asks for them.
        """
        slots = plan.sampled_slots
        count = len(slots)
        results = self._result_parts.first(NUM_SUMS + count)
        if not count:
            return results, None
        if masks is not None:
            self._masks.send(turn, masks)
        bucket = self._buckets[bisect_left(self._buckets, count)] if self._device.captures else count
        self._queue(bucket, self._mode(slots, masks))
        if not wants_logprobs:
            return results, None
        self._queue(bucket, "logprobs")
        return results, self._logprobs[:count]

    @property
    def _variants(self) -> list[tuple[int, Part]]:
        """Bucket and part of each graph. The largest comes first, so that the others fit into its memory."""
        parts: tuple[Part, ...] = (*get_args(Mode), "logprobs")
        return [(bucket, part) for bucket in reversed(self._buckets) for part in parts]

    def _work(self, bucket: int, part: Part) -> Work:
        return partial(self._report, bucket) if part == "logprobs" else partial(self._sample, bucket, part)

    def _queue(self, bucket: int, part: Part) -> None:
        graph = self._graphs.get((bucket, part))
        if graph is None:
            self._device.queue(self._work(bucket, part))
        else:
            graph()

    def _mode(self, slots: Seq[int], masks: GrammarMasks | None) -> Mode:
        """The mode of a head. Only the rank that samples has masks. Modes may differ: all have the same collectives."""
        if masks is not None:
            return "masked"
        rules, is_greedy = self._slots.rules, self._slots.is_greedy
        if any(map(rules.__getitem__, slots)):
            return "ruled"
        return "greedy" if all(map(is_greedy.__getitem__, slots)) else "sampled"

    def _sample(self, bucket: int, mode: Mode) -> None:
        """Compute logits and samples. For a graph, nothing waits for the host, and no shape or branch depends on a value."""
        samples = self._buffers.samples(bucket)
        logits = self.logits[:bucket]
        logits.copy_(self._model.logits(self._hidden_states[samples.tokens]))
        with self.clock.sampling() if self._model.parallel.samples else nullcontext():
            tokens = self._sampler.sample(logits, samples, mode)
        self._model.parallel.share_samples(tokens)
        self._model.ops.store_samples(tokens, samples, self._slots.tokens, self._sampled[:bucket])

    def _report(self, bucket: int) -> None:
        self._logprobs[:bucket] = self._sampler.logprobs(self.logits[:bucket], self._sampled[:bucket])
