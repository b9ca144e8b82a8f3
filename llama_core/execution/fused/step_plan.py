"""Converts the rows of a step to the numbers that a GPU reads, all in one page-locked buffer that is copied once.

The buffer is int64 and has three parts: what the samples need, what the tokens need, and what changes in the slots. The first
two lie at places that depend on a `StepShape` only, so that a CUDA graph of that shape finds them there.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llama_core.scheduling.step import Row

Ints = npt.NDArray[np.int64]

TILE_COLUMNS: Final = 5
_MIN_SPLIT: Final = 128
_MAX_SPLITS: Final = 32
_SAMPLE_COLUMNS: Final = 3
_TOKEN_COLUMNS: Final = 2


class TileSizes(NamedTuple):
    """Tokens of one sequence that a program of the attention kernel computes together: of decodes, and of chunks of prompts."""

    decode: int
    chunk: int


class StepShape(NamedTuple):
    """Numbers of tokens, of tokens of decodes, and of tiles of chunks, which determine every launch of a step but sampling."""

    tokens: int
    decode_tokens: int
    chunk_tiles: int

    @classmethod
    def of_bucket(cls, tokens: int, samples: int, chunk: int) -> "StepShape":
        """Holds every step of at most so many tokens and `samples` rows, with chunks in tiles of `chunk` tokens."""
        return cls(tokens, min(tokens, samples), min(tokens, tokens // chunk + samples))

    def holds(self, other: "StepShape") -> bool:
        return all(own >= needed for own, needed in zip(self, other, strict=True))

    @property
    def size(self) -> int:
        return _TOKEN_COLUMNS * self.tokens + TILE_COLUMNS * (self.decode_tokens + self.chunk_tiles)


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """What the programs of the attention kernel compute, int64 [tiles, TILE_COLUMNS].

    A tile is a run of tokens of one row: its first token in the step, the number of tokens (0: nothing to compute), the slot,
    the position of the first token in its sequence, and the number of tokens in the tiles before it. There are as many tiles
    of decodes as tokens of decodes at most.
    """

    decodes: torch.Tensor
    chunks: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """slots, positions: int64 [T], of each token."""

    slots: torch.Tensor
    positions: torch.Tensor
    tiles: AttentionTiles


class SampleTensors(NamedTuple):
    """int64 [S] of each sample: the token after which it is made, its slot, and its position in its sequence."""

    tokens: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor


def split_size(max_seq_len: int) -> int:
    """Cached positions of a decode that one program reads at least: a power of two, for all sequences alike, so that a
    sequence's result is the same beside any others. Longer contexts have larger splits, whose results need memory."""
    size = _MIN_SPLIT
    while size * _MAX_SPLITS < max_seq_len:
        size *= 2
    return size


def split_count(num_positions: int, size: int, window: int) -> int:
    """Splits of so many positions that one query sees at most."""
    num_splits = -(-num_positions // size)
    return min(num_splits, (window + size - 2) // size + 1) if window else num_splits


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The same on the host. tokens: [2, T]. samples: [3, S]. decodes, chunks: tiles."""

    tokens: Ints
    samples: Ints
    decodes: Ints
    chunks: Ints

    @classmethod
    def of(cls, rows: Seq[Row], tile_sizes: TileSizes) -> "StepPlan":
        table = np.array(rows, dtype=np.int64)
        slots, starts, lengths, samples, num_drafts = table.T
        ends = lengths.cumsum()
        num_samples = samples * (1 + num_drafts)
        # Attention of rows that sample after each token is split over programs: they are few tokens.
        is_decode = num_samples == lengths
        begins = ends - lengths
        if len(rows) == ends[-1]:
            tokens = table.T[:2]
        else:
            row, offset = _ragged(lengths)
            tokens = np.stack([slots[row], starts[row] + offset])
        row, offset = _ragged(num_samples)
        back = num_samples[row] - offset
        sample_columns = np.stack([ends[row] - back, slots[row], starts[row] + lengths[row] + 1 - back])
        runs = np.stack([begins, lengths, slots, starts], axis=1)
        return cls(
            tokens,
            sample_columns,
            _tiles(runs[is_decode], tile_sizes.decode),
            _tiles(runs[~is_decode], tile_sizes.chunk),
        )

    @property
    def shape(self) -> StepShape:
        """The smallest one. A tile of decodes has a token at least."""
        return StepShape(self.tokens.shape[1], int(self.decodes[:, 1].sum()), len(self.chunks))

    @property
    def num_samples(self) -> int:
        return len(self.samples[0])


def _ragged(counts: Ints) -> tuple[Ints, Ints]:
    """For counts [2, 3]: 0 0 1 1 1, and 0 1 0 1 2."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - (counts.cumsum() - counts)[index]


def _tiles(runs: Ints, size: int) -> Ints:
    """Tiles of at most `size` tokens of runs [R, 4] (first token, number of tokens, slot, first position)."""
    if not len(runs):
        return np.empty((0, TILE_COLUMNS), dtype=np.int64)
    lengths = runs[:, 1]
    if lengths.max() == 1:
        return np.concatenate([runs, np.arange(len(runs))[:, None]], axis=1)
    run, index = _ragged(-(-lengths // size))
    tiles = np.empty((len(run), TILE_COLUMNS), dtype=np.int64)
    skipped = index * size
    tiles[:, 0] = runs[run, 0] + skipped
    tiles[:, 1] = np.minimum(size, lengths[run] - skipped)
    tiles[:, 2] = runs[run, 2]
    tiles[:, 3] = runs[run, 3] + skipped
    tiles[:, 4] = tiles[:, 1].cumsum() - tiles[:, 1]
    return tiles


class StepBuffers:
    """The buffers of steps on the host, `turns` of them in turn, and the one on the device that every step reads.

    A turn comes again only when the result of its step was read, which is after its copy.
    """

    def __init__(self, max_samples: int, max_size: int, spare_slot: int, turns: int, device: torch.device) -> None:
        """max_size: integers of the largest step beside its samples, and of changes that travel with it. Larger changes take a
        copy of their own. spare_slot: what padding refers to."""
        self._max_samples = max_samples
        self._spare_slot = spare_slot
        self._device = device
        size = _SAMPLE_COLUMNS * max_samples + max_size
        self._sent = [self._page_locked(size) for _ in range(turns)]
        self._received = torch.zeros(size, dtype=torch.int64, device=device)

    def samples(self, count: int) -> SampleTensors:
        """On the device, of the first `count` samples of every step."""
        columns = self._received[: _SAMPLE_COLUMNS * self._max_samples].view(_SAMPLE_COLUMNS, -1)
        return SampleTensors(*columns[:, :count].unbind(0))

    def tensors(self, shape: StepShape) -> StepTensors:
        """On the device, of every step of this shape."""
        begin = _SAMPLE_COLUMNS * self._max_samples
        tokens, decodes, chunks = self._received[begin : begin + shape.size].split_with_sizes(
            [
                _TOKEN_COLUMNS * shape.tokens,
                TILE_COLUMNS * shape.decode_tokens,
                TILE_COLUMNS * shape.chunk_tiles,
            ]
        )
        slots, positions = tokens.view(_TOKEN_COLUMNS, -1).unbind(0)
        return StepTensors(
            slots, positions, AttentionTiles(decodes.view(-1, TILE_COLUMNS), chunks.view(-1, TILE_COLUMNS))
        )

    def send(self, turn: int, plan: StepPlan, shape: StepShape, changes: Seq[Ints]) -> Seq[torch.Tensor]:
        """Queue the copy of a step, padded to `shape`, and of `changes`. Returns these on the device, valid until the next
        `send`."""
        begin = _SAMPLE_COLUMNS * self._max_samples
        sent = self._sent[turn].numpy()
        columns = sent[:begin].reshape(_SAMPLE_COLUMNS, -1)
        columns[:, : plan.num_samples] = plan.samples
        columns[:, plan.num_samples :] = [[0], [self._spare_slot], [0]]
        tokens = sent[begin : begin + _TOKEN_COLUMNS * shape.tokens].reshape(_TOKEN_COLUMNS, -1)
        num_tokens = plan.tokens.shape[1]
        tokens[:, :num_tokens] = plan.tokens
        tokens[:, num_tokens:] = [[self._spare_slot], [0]]
        at = begin + tokens.size
        for tiles, count in ((plan.decodes, shape.decode_tokens), (plan.chunks, shape.chunk_tiles)):
            end = at + TILE_COLUMNS * count
            sent[at : at + tiles.size] = tiles.ravel()
            sent[at + tiles.size : end] = 0
            at = end
        sizes = [len(change) for change in changes]
        end = at + sum(sizes)
        fits = end <= len(sent)
        if changes and fits:
            sent[at:end] = np.concatenate(changes)
        self._received[: end if fits else at].copy_(self._sent[turn][: end if fits else at], non_blocking=True)
        # Graphs read the buffer where it is, so it cannot grow.
        rest = self._received[at:end] if fits else torch.from_numpy(np.concatenate(changes)).to(self._device)
        return rest.split_with_sizes(sizes)

    def _page_locked(self, size: int) -> torch.Tensor:
        """Page-locked, because a copy from other memory to the device would block the host."""
        return torch.zeros(size, dtype=torch.int64, pin_memory=self._device.type == "cuda")
