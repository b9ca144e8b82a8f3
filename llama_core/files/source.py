"""The Protocols of a checkpoint format. `registry.open_checkpoint` finds the class for a path.

`CheckpointSource` describes the files and reads no weight; the replica, which has no torch, uses it. `WeightReader` reads
weights on the ranks. A format translates its own names, shapes and layouts into those of `model.weights.weight_specs`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from llama_core.model.config import ModelConfig
from llama_core.model.weights import Box

if TYPE_CHECKING:
    import torch


DENSE: Final = "dense"  # `WeightReader.stored_format` of a weight that is stored without codes
GROUP: Final = 32  # inputs that share a scale in most codings


class Slice(NamedTuple):
    """A part of a requested box, as it is stored. file: of the values, also for error messages. start: its first index in the
    box. offset: the byte of `file` at which `values` begin, where they are mapped from it with the same strides; None where
    the reader has computed them.

    `values` is valid until the next slice is requested.
    """

    file: Path
    values: "torch.Tensor"
    start: tuple[int, ...]
    offset: int | None = None


class GroupedSlice(NamedTuple):
    """A part of a requested box of a weight in a coding, see `model.weight_formats.Coding`.

    codes: [rows, columns], int8 of 8 bits, else uint8. scales, minima: float32 [rows, groups]. start: first index in the box.
    The tensors are valid until the next slice is requested.
    """

    file: Path
    codes: "torch.Tensor"
    scales: "torch.Tensor"
    minima: "torch.Tensor | None"
    start: tuple[int, int]


class WeightReader(Protocol):
    """An open checkpoint whose names, shapes and dtypes have been checked against a model configuration.

    ignored: what its files say of quantized activations and caches, which are computed as floats here. of_images: parts of a
    model with images, which are not loaded.
    """

    ignored: Sequence[str] = ()
    of_images: Sequence[str] = ()

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype of the matrices as stored, which the dtype "auto" means."""

    def slices(self, name: str, box: Box) -> Iterator[Slice]:
        """Disjoint slices that together fill `box` of the weight `name`, of a few megabytes each: plain values, whatever the
        file's own encoding is."""

    def stored_format(self, name: str) -> str:
        """DENSE; a coding that `weight_formats.held_as` knows; or the name of another, for people: such a weight has `slices`
        alone."""
        return DENSE

    def grouped_slices(self, name: str, box: Box, coding: str) -> Iterator[GroupedSlice]:
        """Like `slices`, in one of the codings that hold the weight's `stored_format`. The box's columns are whole groups."""
        raise LookupError(f"{name} is not stored as {coding}")

    def verify_checksums(self, index: int, count: int) -> None:
        """Compare the contents of every `count`-th file, from `index`, with the checksums stored in it, if there are any: GGUF
        and safetensors files have none.

        Ranks that see the same files divide them in this way. Raises CheckpointError that names the file.
        """
        return


class CheckpointSource(Protocol):
    """The files of one checkpoint. Every error is a CheckpointError or ConfigError that names the file."""

    @property
    def files(self) -> Sequence[Path]:
        """Every file that a rank reads, in a fixed order, whether it exists or not. Reads nothing."""

    @property
    def metadata_files(self) -> Sequence[Path]:
        """The part of `files` that `model_config` and `stop_ids` read, without weights."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a generation according to the checkpoint's own files, beside those of the tokenizer."""

    def owns(self, name: str) -> bool:
        """Whether a file called `name` in the checkpoint's directory would be part of the checkpoint."""

    def num_shards(self) -> int:
        """The number of shards, which is the default number of ranks. Raises CheckpointError if a shard is missing or damaged,
        as far as the files show that without their weights."""

    def num_rows(self) -> int | None:
        """Rows of the embedding, as the files without weights state them; None if only the tokenizer says their number.

        Raises ConfigError for a model of another family.
        """
        return None

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The architecture. `vocab_size` is the tokenizer's. Raises ConfigError."""

    def open_weights(self, config: ModelConfig) -> WeightReader:
        """Open the shards and check names and shapes against `config`. Raises CheckpointError. Needs torch."""
