"""GGUF, the format of llama.cpp: one file, or the parts of a split one.

Reads no weight and needs no torch: `weights/gguf.py` does.
"""

from collections.abc import Sequence
from pathlib import Path

from llama_core.files.gguf.config import gguf_config, stop_ids
from llama_core.files.gguf.model import SUFFIX, GgufModel
from llama_core.files.source import CheckpointSource, WeightReader
from llama_core.model.config import ModelConfig


class GgufCheckpoint(CheckpointSource):
    """A file whose name ends in .gguf; of a split model the first part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._model = GgufModel(path)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        return path.suffix == SUFFIX

    @property
    def files(self) -> Sequence[Path]:
        """The file, or all parts by the name of the first, whether they exist or not."""
        return self._model.files

    @property
    def metadata_files(self) -> Sequence[Path]:
        """All of them: the configuration follows from the names and shapes of tensors too."""
        return self.files

    @property
    def stop_ids(self) -> frozenset[int]:
        return stop_ids(self._model)

    def owns(self, name: str) -> bool:
        return self._model.owns(name)

    def num_shards(self) -> int:
        """1: the parts of a split file divide no tensor."""
        _ = self._model.tensors
        return 1

    def num_rows(self) -> int:
        return self.model_config(1).vocab_size

    def model_config(self, vocab_size: int) -> ModelConfig:
        return gguf_config(self._model, vocab_size)

    def open_weights(self, config: ModelConfig) -> WeightReader:
        from llama_core.weights.gguf import GgufWeights  # imports torch

        return GgufWeights(self._model, config)
