"""A checkpoint seen as if its linear layers, all but the output layer, were stored in groups of one weight format."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from llama_core.checkpoint.source import DENSE, GROUP, CheckpointSource, GroupedSlice, Slice, WeightReader
from llama_core.checkpoint.weights import OUTPUT, Box, is_linear, weight_specs
from llama_core.errors import CheckpointError, ConfigError
from llama_core.execution.weight_formats.quantize import quantize_groups
from llama_core.model_config import ModelConfig

# Value of `--quantize` -> bits of a code. The formats are those of `hf_quantization.FORMATS`.
BITS: Final = {"int4": 4, "int8": 8}


def is_quantized(name: str) -> bool:
    """Whether the weight becomes codes. vLLM reads no packed output layer of a Llama, so that stays dense."""
    return is_linear(name) and name != OUTPUT


def check_groups(model: ModelConfig) -> None:
    """Raises ConfigError for a model with a matrix that groups do not divide."""
    for name, spec in weight_specs(model).items():
        if is_quantized(name) and spec.shape[1] % GROUP:
            raise ConfigError(
                f"{name} has {spec.shape[1]} inputs, which groups of {GROUP} do not divide: convert it without quantize",
                param="quantize",
            )


class QuantizedReader(WeightReader):
    """Quantizes a weight when it is read. Weights that `reader` stores in the same format keep their codes."""

    def __init__(self, reader: WeightReader, weight_format: str) -> None:
        self._reader = reader
        self._format = weight_format

    @property
    def dtype(self) -> torch.dtype:
        return self._reader.dtype

    def verify_checksums(self, index: int, count: int) -> None:
        self._reader.verify_checksums(index, count)

    def stored_format(self, name: str) -> str:
        return self._format if is_quantized(name) else DENSE

    def slices(self, name: str, box: Box) -> Iterator[Slice]:
        """Of weights that stay dense."""
        assert not is_quantized(name)
        return self._reader.slices(name, box)

    def grouped_slices(self, name: str, box: Box) -> Iterator[GroupedSlice]:
        """Quantized from all values of the box, in float32. Raises CheckpointError for a value that is not finite."""
        if self._reader.stored_format(name) == self._format:
            yield from self._reader.grouped_slices(name, box)
            return
        weight = torch.empty(box.shape, dtype=torch.float32)
        files = []
        for file, values, start, _ in self._reader.slices(name, box):
            weight[tuple(slice(begin, begin + size) for begin, size in zip(start, values.shape, strict=True))] = values
            files.append(file)
        codes, scales, minima = quantize_groups(weight, self._format)
        if not torch.stack((*torch.aminmax(weight), *torch.aminmax(scales))).isfinite().all():
            raise CheckpointError(
                f"{files[-1]}: {name} holds a value that is not finite, or whose scale overflows float16"
            )
        yield GroupedSlice(files[-1], codes, scales, minima, (0, 0))


class QuantizedSource(CheckpointSource):
    """`source`, whose weights a `QuantizedReader` reads."""

    def __init__(self, source: CheckpointSource, weight_format: str) -> None:
        self._source = source
        self._format = weight_format

    @property
    def files(self) -> Sequence[Path]:
        return self._source.files

    @property
    def metadata_files(self) -> Sequence[Path]:
        return self._source.metadata_files

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._source.stop_ids

    def owns(self, name: str) -> bool:
        return self._source.owns(name)

    def num_shards(self) -> int:
        return self._source.num_shards()

    def model_config(self, vocab_size: int) -> ModelConfig:
        return self._source.model_config(vocab_size)

    def open_weights(self, config: ModelConfig) -> WeightReader:
        return QuantizedReader(self._source.open_weights(config), self._format)
