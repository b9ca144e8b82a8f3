"""The Protocols of a checkpoint format. `registry.open_checkpoint` finds the class for a path.

`CheckpointSource` describes the files and reads no weight; the replica, which has no torch, uses it. `WeightReader` reads
weights on the ranks. A format translates its own names, shapes and layouts into those of `weights.weight_specs`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llama_core.checkpoint.weights import Box
from llama_core.model_config import ModelConfig

if TYPE_CHECKING:
    import torch


class Slice(NamedTuple):
    """A part of a requested box, as it is stored. file: for error messages. start: its first index in the box.

    `values` is valid until the next slice is requested.
    """

    file: Path
    values: "torch.Tensor"
    start: tuple[int, ...]


class WeightReader(Protocol):
    """An open checkpoint whose names, shapes and dtypes have been checked against a model configuration."""

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype of the matrices as stored, which the dtype "auto" means."""

    def slices(self, name: str, box: Box) -> Iterator[Slice]:
        """Disjoint slices that together fill `box` of the weight `name`, of a few megabytes each."""

    def verify_checksums(self, index: int, count: int) -> None:
        """Compare the contents of every `count`-th file, from `index`, with the checksums stored in it, if there are any.

        Ranks that see the same files divide them in this way. Raises CheckpointError that names the file.
        """


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

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The architecture. `vocab_size` is the tokenizer's. Raises ConfigError."""

    def open_weights(self, config: ModelConfig) -> WeightReader:
        """Open the shards and check names and shapes against `config`. Raises CheckpointError. Needs torch."""
