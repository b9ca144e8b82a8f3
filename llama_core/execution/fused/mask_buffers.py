"""Masks of grammars on their way to the device: page-locked buffers, used in turn, and the one that every step reads.

A buffer is int64: for each sample the number of its mask, -1 for none, and then the masks of those samples that have one, which
alone are copied.
"""

import numpy as np
import torch

from llama_core.execution.backend import StepMasks
from llama_core.execution.fused import rule_table
from llama_core.execution.fused.device import FusedDevice


class MaskBuffers:
    """indices: int64 [max_samples]. masks: int64 [max_samples, `rule_table.bit_words`]. Both are on the device.

    A host buffer is used again only after the result of its step was read, and so after its copy.
    """

    def __init__(self, max_samples: int, vocab_size: int, turns: int, device: FusedDevice) -> None:
        self._device = device
        self._max_samples = max_samples
        self._num_words = rule_table.bit_words(vocab_size)
        size = max_samples * (1 + self._num_words)
        self._sent = [device.page_locked(size) for _ in range(turns)]
        self._received = torch.zeros(size, dtype=torch.int64, device=device.torch_device)
        self.indices = self._received[:max_samples]
        self.masks = self._received[max_samples:].view(max_samples, -1)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._received.nbytes

    def send(self, turn: int, masks: StepMasks) -> None:
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


def mask_bytes(rows: int, vocab_size: int) -> int:
    """Bytes of `MaskBuffers` on the device."""
    return rows * 8 * (1 + rule_table.bit_words(vocab_size))
