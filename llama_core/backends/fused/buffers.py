"""What travels between the host and the device: changes of slots, a step's integers, and masks of grammars.

A step's integers lie in one page-locked buffer of int64, which is copied to the device once. It has three parts: what the
samples need, what the tokens need, and what changes in the slots. The first two lie at places that depend on a `LaunchShape`
only, so that a CUDA graph of that shape finds them there. Every array that a kernel reads is aligned to 16 bytes in steps of
any shape (`even`). Masks have buffers of their own: for each sample the number of its mask, -1 for none, and then the masks of
those samples that have one, which alone are copied.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from llama_core.backends import logit_rules
from llama_core.backends.fused.device import StepDevice
from llama_core.backends.fused.step_plan import (
    SAMPLE_COLUMNS,
    TILE_COLUMNS,
    TOKEN_COLUMNS,
    AttentionTiles,
    Ints,
    LaunchShape,
    SampleTensors,
    StepArrays,
    StepPlan,
    StepTensors,
    samples_size,
)
from llama_core.backends.sampling_tensors import words_of
from llama_core.backends.slots import SlotTable
from llama_core.config import EngineConfig
from llama_core.grammar.masks import GrammarMasks
from llama_core.scheduling.step import Draft, Grow, SlotInit

_TOKENS, _BLOCKS, _SAMPLING, _RULES, _ADAPTERS = range(5)
_MOST_SHAPES: Final = 1024  # of steps, whose parts of a buffer are kept


@dataclass(frozen=True, slots=True)
class Change:
    """Writes to one of the table's tensors: places (indices into the flattened tensor) and values, each int64 [N]. No place
    occurs twice."""

    target: int
    places: Ints
    values: Ints


class DeviceSlots(SlotTable):
    """A backend sends what `take_changes` returns with its step, and calls `apply` before any kernel reads the table.

    rule_words: int64 [slots, `logit_rules.table_words`], of the slots whose `rules` are not None; else without rules.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device, spare=1)
        words = logit_rules.table_words(config.vocab_size)
        self.rule_words = torch.zeros((len(self.rules), words), dtype=torch.int64, device=device)
        adapters = self.adapter_places.unsqueeze(1)
        tables = (self.tokens, self.block_tables, self.sampling.words, self.rule_words, adapters)
        self._targets = [table.view(-1) for table in tables]
        self._strides = [table.shape[1] for table in tables]
        self._writes: list[list[tuple[int, Seq[int] | Ints]]] = [[] for _ in tables]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(target.nbytes for target in self._targets)

    def admit(self, init: SlotInit) -> None:
        self._write(_TOKENS, init.slot, 0, init.tokens)
        self._write(_BLOCKS, init.slot, 0, init.blocks)
        self._write(_SAMPLING, init.slot, 0, words_of(init.params))
        if self.has_adapter[init.slot] or init.adapter_place:
            self._write(_ADAPTERS, init.slot, 0, [init.adapter_place])
        had_rules = self.rules[init.slot] is not None
        self._note(init)
        rules = self.rules[init.slot]
        if rules is not None:
            for first, values in logit_rules.parts_of(rules):
                self._write(_RULES, init.slot, first, values)
        elif had_rules:
            self._write(_RULES, init.slot, 0, logit_rules.NO_RULES)

    def grow(self, grow: Grow) -> None:
        slot, block = grow
        self._write(_BLOCKS, slot, self.num_blocks[slot], [block])
        self.num_blocks[slot] += 1

    def propose(self, draft: Draft) -> None:
        slot, start, tokens = draft
        self._write(_TOKENS, slot, start, tokens)

    def take_changes(self) -> list[Change]:
        """The changes since the last call."""
        changes = []
        for target, writes in enumerate(self._writes):
            if writes:
                places = [np.arange(first, first + len(values)) for first, values in writes]
                values = [np.asarray(values, dtype=np.int64) for _, values in writes]
                changes.append(Change(target, np.concatenate(places), np.concatenate(values)))
                writes.clear()
        return changes

    def apply(self, changes: Seq[Change], sent: Seq[torch.Tensor]) -> None:
        """Write `changes`, whose places and values lie on the device: `sent` has both of each."""
        for change, places, values in zip(changes, sent[::2], sent[1::2], strict=True):
            self._targets[change.target].index_copy_(0, places, values)

    def _write(self, target: int, slot: int, first: int, values: Seq[int] | Ints) -> None:
        self._writes[target].append((slot * self._strides[target] + first, values))


class Prefixes:
    """Views of a tensor's first elements, which every step needs. They are kept, because a new view takes about 2 us."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._views: dict[int, torch.Tensor] = {}

    def first(self, count: int) -> torch.Tensor:
        found = self._views.get(count)
        if found is None:
            found = self._views[count] = self.tensor[:count]
        return found


def _parts(buffer: torch.Tensor, max_samples: int, shape: LaunchShape) -> tuple[torch.Tensor, ...]:
    """Views of a buffer, as `StepArrays` has them."""
    begin = samples_size(max_samples)
    samples = buffer[:begin].view(SAMPLE_COLUMNS, -1)[:, :max_samples]
    tokens, decodes, chunks = buffer[begin : begin + shape.size].split_with_sizes(shape.sizes)
    return (
        samples,
        tokens.view(TOKEN_COLUMNS, -1)[:, : shape.tokens],
        decodes[: TILE_COLUMNS * shape.decode_tokens].view(-1, TILE_COLUMNS),
        chunks[: TILE_COLUMNS * shape.chunk_tiles].view(-1, TILE_COLUMNS),
    )


class _SentBuffer:
    """One buffer on the host, and its parts for each shape that was sent before."""

    def __init__(self, buffer: torch.Tensor, max_samples: int) -> None:
        self.parts = Prefixes(buffer)
        self.numbers: Ints = buffer.numpy()
        self._max_samples = max_samples
        self._arrays: dict[LaunchShape, StepArrays] = {}
        self._last: tuple[LaunchShape, int | None] | None = None
        self.large: torch.Tensor | None = None  # changes beyond the buffer, kept until they are copied

    def write(self, plan: StepPlan, shape: LaunchShape, spare_slot: int) -> None:
        last, self._last = self._last, (shape, plan.num_decodes)
        is_repeated = plan.num_decodes is not None and last == self._last
        plan.write(self.arrays(shape), spare_slot, is_repeated=is_repeated)

    def arrays(self, shape: LaunchShape) -> StepArrays:
        found = self._arrays.get(shape)
        if found is None:
            if len(self._arrays) >= _MOST_SHAPES:
                self._arrays.clear()
            parts = _parts(self.parts.tensor, self._max_samples, shape)
            found = StepArrays(*(part.numpy() for part in parts))
            self._arrays[shape] = found
        return found


class StepBuffers:
    """The buffers of steps: `turns` of them on the host, used in turn, and the one on the device that every step reads.

    A host buffer is used again only after the result of its step was read, and so after its copy.
    """

    def __init__(self, max_samples: int, max_size: int, spare_slot: int, turns: int, device: StepDevice) -> None:
        """max_size: integers of the largest step beside its samples, and of changes that travel with it. Larger changes take a
        copy of their own. spare_slot: what padding refers to."""
        self._max_samples = max_samples
        self._spare_slot = spare_slot
        self._device = device
        size = samples_size(max_samples) + max_size
        self._sent = [_SentBuffer(device.page_locked(size), max_samples) for _ in range(turns)]
        self._received = torch.zeros(size, dtype=torch.int64, device=device.torch_device)
        self._received_parts = Prefixes(self._received)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._received.nbytes

    def samples(self, count: int) -> SampleTensors:
        """The tensors of the first `count` samples, on the device, at the same addresses in every step."""
        columns = self._received[: samples_size(self._max_samples)].view(SAMPLE_COLUMNS, -1)
        return SampleTensors(*columns[:, :count].unbind(0))

    def tensors(self, shape: LaunchShape) -> StepTensors:
        """The tensors of steps of this shape, on the device, at the same addresses in every such step."""
        _, tokens, decodes, chunks = _parts(self._received, self._max_samples, shape)
        slots, positions = tokens.unbind(0)
        return StepTensors(slots, positions, AttentionTiles(decodes, chunks))

    def send(self, turn: int, plan: StepPlan, shape: LaunchShape, changes: Seq[Ints]) -> Seq[torch.Tensor]:
        """Queue the copy of a step, padded to `shape`, and of `changes`. Returns these on the device, valid until the next
        `send`."""
        sent = self._sent[turn]
        sent.write(plan, shape, self._spare_slot)
        begin = samples_size(self._max_samples) + shape.size
        if not changes:
            self._device.copy(self._received_parts.first(begin), sent.parts.first(begin))
            return ()
        sizes, values = [len(change) for change in changes], np.concatenate(changes)
        end = begin + len(values)
        if end > len(sent.numbers):
            # Graphs read the buffer where it is, so it cannot grow.
            self._device.copy(self._received_parts.first(begin), sent.parts.first(begin))
            sent.large = self._device.page_locked(len(values))
            sent.large.numpy()[:] = values
            received = torch.empty(len(values), dtype=torch.int64, device=self._device.torch_device)
            self._device.copy(received, sent.large)
            return received.split_with_sizes(sizes)
        sent.numbers[begin:end] = values
        self._device.copy(self._received[:end], sent.parts.tensor[:end])
        return self._received[begin:end].split_with_sizes(sizes)


class MaskBuffers:
    """indices: int64 [max_samples]. masks: int64 [max_samples, `logit_rules.bit_words`]. Both are on the device.

    A host buffer is used again only after the result of its step was read, and so after its copy.
    """

    def __init__(self, max_samples: int, vocab_size: int, turns: int, device: StepDevice) -> None:
        self._device = device
        self._max_samples = max_samples
        self._num_words = logit_rules.bit_words(vocab_size)
        size = max_samples * (1 + self._num_words)
        self._sent = [device.page_locked(size) for _ in range(turns)]
        self._received = torch.zeros(size, dtype=torch.int64, device=device.torch_device)
        self.indices = self._received[:max_samples]
        self.masks = self._received[max_samples:].view(max_samples, -1)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._received.nbytes

    def send(self, turn: int, masks: GrammarMasks) -> None:
        """Wait for the thread that computes the masks, and queue their copy."""
        sent = self._sent[turn]
        indices, words = np.split(sent.numpy(), [self._max_samples])
        bits = words.reshape(self._max_samples, -1).view(np.uint32)
        has_mask = np.array(masks.has_mask)
        count = int(has_mask.sum())
        indices.fill(-1)
        indices[: len(has_mask)][has_mask] = np.arange(count)
        masks.wait()
        bits[:count, : masks.bits.shape[1]] = masks.bits[has_mask]
        end = self._max_samples + count * self._num_words
        self._device.copy(self._received[:end], sent[:end])
