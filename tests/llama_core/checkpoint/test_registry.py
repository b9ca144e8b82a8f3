"""A checkpoint format is found by what lies at the path; one line in a table adds a format."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from llama_core import Llama
from llama_core.checkpoint import registry
from llama_core.checkpoint.meta import MetaCheckpoint
from llama_core.checkpoint.meta_params import config_from_params
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.checkpoint.source import CheckpointSource, Slice, WeightReader
from llama_core.checkpoint.weights import Box, weight_specs
from llama_core.model_config import ModelConfig
from tests.conftest import GOLDEN
from tests.support.checkpoints import WIDE, open_weights, random_weights, split, write

CONFIG = config_from_params(WIDE, vocab_size=640)


class OneFileCheckpoint(CheckpointSource):
    """All weights in one file, transposed, one row at a time; EOS is id 9."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        return path.suffix == ".weights"

    @property
    def files(self) -> Sequence[Path]:
        return [self.path]

    @property
    def metadata_files(self) -> Sequence[Path]:
        return [self.path]

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({9})

    def owns(self, name: str) -> bool:
        return name == self.path.name

    def num_shards(self) -> int:
        return 1

    def model_config(self, vocab_size: int) -> ModelConfig:
        return CONFIG

    def open_weights(self, config: ModelConfig) -> WeightReader:
        return OneFileWeights(self.path)


class OneFileWeights(WeightReader):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._weights: dict[str, torch.Tensor] = torch.load(path)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def slices(self, name: str, box: Box) -> Iterator[Slice]:
        region = tuple(slice(begin, begin + size) for begin, size in zip(box.start, box.shape, strict=True))
        for row, values in enumerate(_transposed(self._weights[name])[region]):
            yield Slice(self._path, values[None] if values.ndim else values.reshape(1), (row, *[0] * values.ndim))

    def verify_checksums(self, index: int, count: int) -> None: ...


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.permute(*reversed(range(weight.ndim)))


def test_a_directory_with_shards_is_metas_format() -> None:
    assert isinstance(open_checkpoint(GOLDEN / "mp2"), MetaCheckpoint)
    assert open_checkpoint(str(GOLDEN / "mp2")).num_shards() == 2


def test_another_format_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FORMATS", {"one": f"{__name__}:OneFileCheckpoint"} | dict(registry.FORMATS))
    weights = random_weights(WIDE)
    meta = write(tmp_path / "meta", split(weights, 2))
    one = tmp_path / "model.weights"
    torch.save({name: _transposed(weight).contiguous() for name, weight in weights.items()}, one)
    tokenizer = meta / "tokenizer.model"
    outputs = []
    for path in (meta, one):
        llama = Llama.build(path, tokenizer, 32, 2, device="cpu", backend="torch")
        outputs.append(llama.generate([[1, 5, 7]], 16, temperature=0)[0])
    stop = outputs[0][0].index(9) if 9 in outputs[0][0] else None
    assert outputs[1] == [outputs[0][0][:stop]]


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("embedding_dim", [0, 1])
def test_slices_of_any_box_fill_it_with_the_weights_values(tmp_path: Path, num_shards: int, embedding_dim: int) -> None:
    """Also of a box that no number of ranks asks for: parts need not be equal, and may lie across shards."""
    weights = random_weights(WIDE)
    reader = open_weights(write(tmp_path, split(weights, num_shards, embedding_dim=embedding_dim)), CONFIG)
    for name, spec in weight_specs(CONFIG).items():
        start = tuple(size // 3 for size in spec.shape)
        shape = tuple(size - begin - size // 5 for begin, size in zip(start, spec.shape, strict=True))
        got = torch.full(shape, torch.nan)
        for part in reader.slices(name, Box(start, shape)):
            region = tuple(slice(b, b + size) for b, size in zip(part.start, part.values.shape, strict=True))
            assert got[region].isnan().all(), "slices are disjoint"
            got[region] = part.values
        expected = weights[name][tuple(slice(b, b + size) for b, size in zip(start, shape, strict=True))]
        assert torch.equal(got, expected), name
