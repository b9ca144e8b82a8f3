"""The end of a step on a GPU: logits, and sampled tokens, which become the next step's inputs on the device."""

import math
from bisect import bisect_left
from collections.abc import Sequence as Seq
from functools import partial
from typing import Literal, get_args

import torch

from llama_core.config import EngineConfig
from llama_core.execution.backend import NOT_FINITE, NOTHING_ALLOWED, StepMasks
from llama_core.execution.fused.device import FusedDevice, Graph, Work
from llama_core.execution.fused.device_slots import DeviceSlots
from llama_core.execution.fused.model import FusedTransformer
from llama_core.execution.fused.step_buffers import StepBuffers
from llama_core.execution.fused.step_plan import StepPlan
from llama_core.execution.logit_rules import edit_logits
from llama_core.execution.parallel import Parallel
from llama_core.execution.sampling import sample_sorted

# What a head ends with: the most likely tokens, sampled tokens, or logits, which rules or grammars change afterwards.
Mode = Literal["greedy", "sampled", "logits"]
# Temporary memory for each logit: softmax, sort (values, int64 ids, scratch) and two cumulative sums (one double).
_BYTES_PER_LOGIT = 56


def bucket_sizes(largest: int) -> list[int]:
    """Tokens of the decode steps that are captured: powers of two up to 32, then steps of 32, and `largest` itself."""
    sizes = {1 << i for i in range(6)} | set(range(32, largest, 32)) | {largest}
    return sorted(size for size in sizes if size <= largest)


def sampling_bytes(config: EngineConfig) -> int:
    """Of sampling, in the memory of the graphs and outside of it, and of the logits of the latest step."""
    return config.max_step_samples * config.vocab_size * (2 * _BYTES_PER_LOGIT + 4)


class SamplingHead:
    """Samples the tokens that a `StepPlan` names after the hidden states of the step. All ranks sample the same tokens.

    logits: float32 [samples, vocab] of the latest step.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: FusedTransformer,
        parallel: Parallel,
        slots: DeviceSlots,
        device: FusedDevice,
        buffers: StepBuffers,
        hidden_states: torch.Tensor,
    ) -> None:
        self._model = model
        self._parallel = parallel
        self._slots = slots
        self._device = device
        self._buffers = buffers
        self._hidden_states = hidden_states
        self._buckets = bucket_sizes(config.max_step_samples)
        self._graphs: dict[tuple[int, Mode], Graph] = {}
        # Graphs write to these tensors, so they stay in place.
        shape = (config.max_step_samples, config.vocab_size)
        self.logits = torch.zeros(shape, dtype=torch.float32, device=device.torch_device)
        self._sampled = torch.zeros(config.max_step_samples, dtype=torch.int64, device=device.torch_device)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def works(self) -> list[Work]:
        """What is captured."""
        return [partial(self._sample, bucket, mode) for bucket, mode in self._variants]

    def capture(self) -> None:
        """Raises RuntimeError where a head cannot be captured."""
        for variant, work in zip(self._variants, self.works, strict=True):
            self._graphs[variant] = self._device.capture(work)

    def release_graphs(self) -> None:
        self._graphs.clear()

    def start(self, plan: StepPlan, masks: StepMasks | None) -> torch.Tensor:
        """Queue the samples of the step whose inputs were sent, int64 [S]: NOT_FINITE or NOTHING_ALLOWED where there is none.
        They stay until the next step's."""
        slots = plan.sampled_slots
        count = len(slots)
        if not count:
            return self._sampled[:0]
        bucket = self._buckets[bisect_left(self._buckets, count)]
        mode = self._mode(slots, masks)
        graph = self._graphs.get((bucket, mode))
        if graph is None:
            self._device.queue(partial(self._sample, bucket, mode))
        else:
            graph.replay()
        if mode == "logits":
            samples = list(zip(slots, plan.sampled_positions, strict=True))
            self._device.queue(partial(self._sample_edited, samples, masks))
        return self._sampled[:count]

    @property
    def _variants(self) -> list[tuple[int, Mode]]:
        """Largest first, so that the others fit into its memory."""
        return [(bucket, mode) for bucket in reversed(self._buckets) for mode in get_args(Mode)]

    def _mode(self, slots: Seq[int], masks: StepMasks | None) -> Mode:
        rules, is_greedy = self._slots.rules, self._slots.is_greedy
        if masks is not None or any(map(rules.__getitem__, slots)):
            return "logits"
        return "greedy" if all(map(is_greedy.__getitem__, slots)) else "sampled"

    def _sample(self, bucket: int, mode: Mode) -> None:
        """Nothing waits for the host or depends on a value."""
        samples = self._buffers.samples(bucket)
        logits = self.logits[:bucket]
        logits.copy_(self._model.logits(self._hidden_states[samples.tokens]))
        if mode == "logits":
            return
        finite = logits.sum(-1).isfinite()
        usable = torch.where(finite[:, None], logits, 0.0)
        if mode == "greedy":
            tokens = usable.argmax(-1)
        else:
            tokens = sample_sorted(usable, self._slots.sampling.at(samples.slots), samples.positions)
        # Ranks may differ in the last bit of a logit: rank 0 samples for all.
        self._parallel.broadcast(tokens)
        self._slots.tokens[samples.slots, samples.positions] = tokens
        self._sampled[:bucket] = torch.where(finite, tokens, NOT_FINITE)

    def _sample_edited(self, places: Seq[tuple[int, int]], masks: StepMasks | None) -> None:
        """Samples for these slots and positions, after the rules and grammars of their slots have changed the logits.

        The host waits for `masks`, and the device for the host.
        """
        slots, samples = self._slots, self._buffers.samples(len(places))
        logits = self.logits[: len(places)]
        finite = logits.sum(-1).isfinite()
        edited = edit_logits(torch.where(finite[:, None], logits, 0.0), places, slots.rules, slots.tokens, masks)
        allowed = edited.amax(-1) > -math.inf
        usable = torch.where(allowed[:, None], edited, 0.0)
        tokens = sample_sorted(usable, slots.sampling.at(samples.slots), samples.positions)
        tokens = torch.where(allowed, tokens, NOTHING_ALLOWED).where(finite, NOT_FINITE)
        self._parallel.broadcast(tokens)
        slots.tokens[samples.slots, samples.positions] = tokens.clamp(min=0)
        self._sampled[: len(places)] = tokens
