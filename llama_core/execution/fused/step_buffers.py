"""A step's integers in one page-locked buffer, which is copied to the device once.

The buffer is int64 and has three parts: what the samples need, what the tokens need, and what changes in the slots. The first
two lie at places that depend on a `LaunchShape` only, so that a CUDA graph of that shape finds them there. Every array that a
kernel reads is aligned to 16 bytes in steps of any shape (`even`).
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from llama_core.execution.fused.device import FusedDevice
from llama_core.execution.fused.step_plan import (
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
    even,
)


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


def samples_size(max_samples: int) -> int:
    """Integers of the samples of every step."""
    return SAMPLE_COLUMNS * even(max_samples)


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
            begin = samples_size(self._max_samples)
            tokens, decodes, chunks, _ = np.split(self.numbers[begin:], np.cumsum(shape.sizes))
            found = StepArrays(
                self.numbers[:begin].reshape(SAMPLE_COLUMNS, -1)[:, : self._max_samples],
                tokens.reshape(TOKEN_COLUMNS, -1)[:, : shape.tokens],
                decodes[: TILE_COLUMNS * shape.decode_tokens].reshape(-1, TILE_COLUMNS),
                chunks[: TILE_COLUMNS * shape.chunk_tiles].reshape(-1, TILE_COLUMNS),
            )
            self._arrays[shape] = found
        return found


class StepBuffers:
    """The buffers of steps: `turns` of them on the host, used in turn, and the one on the device that every step reads.

    A host buffer is used again only after the result of its step was read, and so after its copy.
    """

    def __init__(self, max_samples: int, max_size: int, spare_slot: int, turns: int, device: FusedDevice) -> None:
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
        begin = samples_size(self._max_samples)
        tokens, decodes, chunks = self._received[begin : begin + shape.size].split_with_sizes(shape.sizes)
        slots, positions = tokens.view(TOKEN_COLUMNS, -1)[:, : shape.tokens].unbind(0)
        tiles = AttentionTiles(
            decodes[: TILE_COLUMNS * shape.decode_tokens].view(-1, TILE_COLUMNS),
            chunks[: TILE_COLUMNS * shape.chunk_tiles].view(-1, TILE_COLUMNS),
        )
        return StepTensors(slots, positions, tiles)

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
