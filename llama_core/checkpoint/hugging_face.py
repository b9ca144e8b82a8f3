"""Hugging Face's checkpoint format: a folder with config.json and safetensors files. Needs no torch: `weights/hf.py` does."""

from collections.abc import Sequence
from pathlib import Path

from llama_core.files.generation_config import read_stop_ids
from llama_core.files.hf.config import model_from_config, text_config
from llama_core.files.hf.files import INDEX, find_weights, is_weights_file
from llama_core.files.hf.quantization import read_quantization
from llama_core.files.json_fields import read_object
from llama_core.files.source import CheckpointSource, WeightReader
from llama_core.model.config import ModelConfig
from llama_core.model.fields import Fields

_CONFIG, _GENERATION = "config.json", "generation_config.json"


class HuggingFaceCheckpoint(CheckpointSource):
    """A folder in Hugging Face's format."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """True for a folder with config.json and without Meta's shards."""
        try:
            return (path / _CONFIG).is_file() and next(path.glob("consolidated.*.pth"), None) is None
        except OSError:
            return False

    @property
    def files(self) -> Sequence[Path]:
        """The metadata, and every file that may hold weights."""
        weights = (file for file in self.path.glob("*.safetensors") if is_weights_file(file.name))
        return [*self.metadata_files, *sorted(weights)]

    @property
    def metadata_files(self) -> Sequence[Path]:
        """config.json; generation_config.json and the index of the weights where they exist."""
        optional = (self.path / name for name in (_GENERATION, INDEX))
        return [self.path / _CONFIG, *(file for file in optional if file.exists())]

    @property
    def stop_ids(self) -> frozenset[int]:
        """The values of eos_token_id in config.json and generation_config.json."""
        return read_stop_ids(self.path)

    def owns(self, name: str) -> bool:
        return name in (_CONFIG, _GENERATION, INDEX) or is_weights_file(name)

    def num_shards(self) -> int:
        """1: files say nothing about ranks. Checks the header of every file."""
        find_weights(self.path)
        return 1

    def num_rows(self) -> int:
        return self.model_config(1).vocab_size

    def model_config(self, vocab_size: int) -> ModelConfig:
        path = self.path / _CONFIG
        return model_from_config(read_object(path), vocab_size=vocab_size, source=str(path))

    def open_weights(self, config: ModelConfig) -> WeightReader:
        from llama_core.weights.hf import HuggingFaceWeights  # imports torch

        path = self.path / _CONFIG
        quantization = read_quantization(Fields(text_config(read_object(path), str(path)), str(path)))
        return HuggingFaceWeights(self.path, find_weights(self.path), config, quantization)
