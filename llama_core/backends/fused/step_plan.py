"""Converts the rows of a step to the integers that a GPU reads: for its tokens, its attention tiles and its samples."""

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llama_core.config import EngineConfig
from llama_core.scheduling.step import Row

Ints = npt.NDArray[np.int64]

TILE_COLUMNS: Final = 5
SAMPLE_COLUMNS: Final = 3
TOKEN_COLUMNS: Final = 2
_NO_TILES: Final = np.empty((0, TILE_COLUMNS), dtype=np.int64)
# Tokens of steps with prompts that are captured. The launches of larger ones take less time than the GPU.
CAPTURED_PROMPT_TOKENS: Final = (32, 64, 128, 256, 512)
LARGEST_PADDING: Final = 1.06  # of a step with more tokens, whose products are as long as its padding


def even(count: int) -> int:
    """`count` rounded up to an even number of int64, so that the next array is aligned to 16 bytes. For an argument that is not
    aligned, Triton would compile another variant of a kernel while the server runs."""
    return count + count % 2


class TileSizes(NamedTuple):
    """Tokens of one sequence that a program of the attention kernel computes together: of decodes, and of chunks of prompts."""

    decode: int
    chunk: int


class LaunchShape(NamedTuple):
    """Numbers of tokens, of tokens of decodes, and of tiles of chunks, which determine every launch of a step but sampling."""

    tokens: int
    decode_tokens: int
    chunk_tiles: int

    @classmethod
    def of_bucket(cls, tokens: int, samples: int, chunk: int) -> "LaunchShape":
        """Holds every step of at most so many tokens and `samples` rows, with chunks in tiles of `chunk` tokens."""
        return cls(tokens, min(tokens, samples), min(tokens, tokens // chunk + samples))

    def holds(self, other: "LaunchShape") -> bool:
        return all(own >= needed for own, needed in zip(self, other, strict=True))

    @property
    def sizes(self) -> list[int]:
        """Integers of the tokens, the tiles of decodes and those of chunks, each with its padding (`even`)."""
        return [
            TOKEN_COLUMNS * even(self.tokens),
            even(TILE_COLUMNS * self.decode_tokens),
            even(TILE_COLUMNS * self.chunk_tiles),
        ]

    @property
    def size(self) -> int:
        return sum(self.sizes)


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


class StepArrays(NamedTuple):
    """Where a plan is written, with padding at the end of each array: samples [3, max_samples] (see `SampleTensors`), tokens
    [2, T] (slots, positions), tiles [N, TILE_COLUMNS] (see `AttentionTiles`)."""

    samples: Ints
    tokens: Ints
    decodes: Ints
    chunks: Ints


def plan_of(rows: Seq[Row], tile_sizes: TileSizes) -> "StepPlan":
    """The plan of a step. Steps of decodes without drafts have a quicker one."""
    slots, starts, lengths, samples, num_drafts = zip(*rows, strict=True)
    if all(samples) and max(lengths) == 1:
        return _DecodePlan(slots, starts)
    return _MixedPlan(np.array((slots, starts, lengths, samples, num_drafts), dtype=np.int64), tile_sizes)


class _DecodePlan:
    """The plan of decodes without drafts, as most steps are. It is written fast, because a GPU faster than the host waits for
    it.

    shape: the smallest one that holds the step. sampled_slots: of each sample. num_decodes: the number of rows where all are
    decodes without drafts, else None.
    """

    def __init__(self, slots: Seq[int], starts: Seq[int]) -> None:
        count = len(slots)
        self.num_decodes: int | None = count
        self.shape = LaunchShape(count, count, 0)
        self.sampled_slots = slots
        self._starts = starts

    def write(self, to: StepArrays, spare_slot: int, *, is_repeated: bool = False) -> None:
        """Padding has the spare slot, and tiles without tokens. is_repeated: the plan that was written there last had the same
        `num_decodes`."""
        count = len(self._starts)
        if not is_repeated:
            to.samples[0, :count] = to.decodes[:count, 0] = to.decodes[:count, 4] = np.arange(count)
            to.decodes[:count, 1] = 1
            _pad(to, count, count, count, 0, spare_slot)
        tokens = np.array((self.sampled_slots, self._starts), dtype=np.int64)
        to.tokens[:, :count] = to.samples[1:, :count] = tokens
        to.decodes[:count, 2:4] = tokens.T
        to.samples[2, :count] += 1


class _MixedPlan:
    """The plan of any rows, from their fields, int64 [5, R]."""

    def __init__(self, fields: Ints, tile_sizes: TileSizes) -> None:
        slots, starts, lengths, samples, num_drafts = fields
        ends = lengths.cumsum()
        num_samples = samples * (1 + num_drafts)
        # Attention of rows that sample after each token is split over programs: they are few tokens.
        is_decode = num_samples == lengths
        row, offset = _ragged(lengths)
        self._tokens = np.stack([slots[row], starts[row] + offset])
        row, offset = _ragged(num_samples)
        back = num_samples[row] - offset
        self._samples = np.stack([ends[row] - back, slots[row], starts[row] + lengths[row] + 1 - back])
        runs = np.stack([ends - lengths, lengths, slots, starts], axis=1)
        self._decodes = _tiles(runs[is_decode], tile_sizes.decode)
        self._chunks = _tiles(runs[~is_decode], tile_sizes.chunk)
        self.num_decodes: int | None = None
        self.shape = LaunchShape(len(self._tokens[0]), int(lengths[is_decode].sum()), len(self._chunks))
        self.sampled_slots: Seq[int] = self._samples[1].tolist()

    def write(self, to: StepArrays, spare_slot: int, *, is_repeated: bool = False) -> None:
        counts = len(self._samples[0]), len(self._tokens[0]), len(self._decodes), len(self._chunks)
        to.samples[:, : counts[0]] = self._samples
        to.tokens[:, : counts[1]] = self._tokens
        to.decodes[: counts[2]] = self._decodes
        to.chunks[: counts[3]] = self._chunks
        _pad(to, *counts, spare_slot)


StepPlan = _DecodePlan | _MixedPlan


def _pad(to: StepArrays, samples: int, tokens: int, decodes: int, chunks: int, spare_slot: int) -> None:
    """Fill the arrays after what a plan has written."""
    to.samples[:, samples:] = 0
    to.samples[1, samples:] = spare_slot
    if tokens < to.tokens.shape[1]:
        to.tokens[0, tokens:] = spare_slot
        to.tokens[1, tokens:] = 0
    to.decodes[decodes:, 1] = 0
    to.chunks[chunks:, 1] = 0


def _ragged(counts: Ints) -> tuple[Ints, Ints]:
    """For counts [2, 3]: 0 0 1 1 1, and 0 1 0 1 2."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - (counts.cumsum() - counts)[index]


def _tiles(runs: Ints, size: int) -> Ints:
    """Tiles of at most `size` tokens of runs [R, 4] (first token, number of tokens, slot, first position)."""
    if not len(runs):
        return _NO_TILES
    lengths = runs[:, 1]
    run, index = _ragged(-(-lengths // size))
    tiles = np.empty((len(run), TILE_COLUMNS), dtype=np.int64)
    skipped = index * size
    tiles[:, 0] = runs[run, 0] + skipped
    tiles[:, 1] = np.minimum(size, lengths[run] - skipped)
    tiles[:, 2] = runs[run, 2]
    tiles[:, 3] = runs[run, 3] + skipped
    tiles[:, 4] = tiles[:, 1].cumsum() - tiles[:, 1]
    return tiles


def samples_size(max_samples: int) -> int:
    """Integers of the samples of every step."""
    return SAMPLE_COLUMNS * even(max_samples)


def bucket_sizes(largest: int) -> list[int]:
    """Tokens of the decode steps that are captured: powers of two up to 32, then steps of 32, and `largest` itself."""
    sizes = {1 << i for i in range(6)} | set(range(32, largest, 32)) | {largest}
    return sorted(size for size in sizes if size <= largest)


class StepBuckets:
    """Buckets of decode steps by their tokens, and of steps with chunks of prompts by theirs. largest: holds every step."""

    def __init__(self, config: EngineConfig, chunk: int) -> None:
        """chunk: tokens of a tile of a prompt's chunk (`TileSizes`)."""
        max_tokens, max_samples = config.max_step_tokens, config.max_step_samples
        self.largest = LaunchShape.of_bucket(max_tokens, max_samples, chunk)
        self._decode_tokens = bucket_sizes(max_samples)
        self._decodes = [LaunchShape(size, size, 0) for size in self._decode_tokens]
        self._mixed = [
            LaunchShape.of_bucket(size, max_samples, chunk) for size in CAPTURED_PROMPT_TOKENS if size <= max_tokens
        ]
        # Most steps of a long prompt are as large as a step may be.
        self._mixed += [self.largest] if max_tokens not in CAPTURED_PROMPT_TOKENS else []

    @property
    def all(self) -> list[LaunchShape]:
        """All buckets. The largest comes first, so that the graphs of the others fit into its memory."""
        return [*reversed(self._mixed), *reversed(self._decodes)]

    def of(self, shape: LaunchShape) -> LaunchShape:
        """The smallest bucket that holds a step of this shape; the shape itself where padding would cost more than a graph
        saves."""
        if not shape.chunk_tiles:
            return self._decodes[bisect_left(self._decode_tokens, shape.tokens)]
        bucket = next((bucket for bucket in self._mixed if bucket.holds(shape)), shape)
        is_small = bucket.tokens <= CAPTURED_PROMPT_TOKENS[-1]
        return bucket if is_small or bucket.tokens <= LARGEST_PADDING * shape.tokens else shape
