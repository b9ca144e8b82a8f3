"""Uploads through page-locked buffers, on a device whose copies run as late as their order allows."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Encoding

from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import CheckpointError
from llama_core.files.source import Slice
from llama_core.model.share import RankShare
from llama_core.model.weight_formats import CODINGS
from llama_core.model.weights import weight_specs
from llama_core.weights.loader import planned_weights
from llama_core.weights.uploads import FileReads, Uploads
from tests.support.checkpoints import WIDE, random_weights, split, write
from tests.support.gguf_models import VOCABULARY, write_model
from tests.support.hugging_face import CONFIGS, VOCAB_SIZE, read
from tests.support.hugging_face import random_weights as random_hugging_face
from tests.support.hugging_face import write as write_hugging_face

BUFFER = 1024
NOWHERE = Path("nowhere")
CPU = torch.device("cpu")
LARGE = WIDE | {"dim": 1024, "n_layers": 1, "multiple_of": 512}


class LateCopies:
    """`Transfers` whose queue runs when a point in it is waited for."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.buffers: list[torch.Tensor] = []
        self.num_waits = 0

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        self.buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> None:
        self.queue.append(lambda: target.copy_(staged))

    def record(self) -> "Point":
        return Point(self, len(self.queue))


class Point:
    def __init__(self, copies: LateCopies, end: int) -> None:
        self._copies, self._end = copies, end

    def synchronize(self) -> None:
        """Later copies stay in the queue; those that ran leave a no-op behind."""
        self._copies.num_waits += 1
        for index in range(self._end):
            self._copies.queue[index]()
            self._copies.queue[index] = lambda: None


def uploaded(values: list[torch.Tensor], dtype: torch.dtype) -> tuple[list[torch.Tensor], LateCopies]:
    copies = LateCopies()
    uploads = Uploads(torch.device("cpu"), copies, BUFFER)
    targets = [torch.full(value.shape, -1, dtype=dtype) for value in values]
    for target, value in zip(targets, values, strict=True):
        uploads.copy(target, Slice(NOWHERE, value, (0,)))
    uploads.flush()
    copies.record().synchronize()
    return targets, copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slice_arrives_whole_however_late_its_copy_runs(dtype: torch.dtype) -> None:
    """Slices of many sizes, also larger than a buffer, of which some fill a buffer to its last byte."""
    sizes = [1, 7, 100, 256, 13, 256, 1000, 3, 90, 256, 255, 2, 700]
    values = [torch.randn(size, generator=torch.Generator().manual_seed(size + i)) for i, size in enumerate(sizes)]
    targets, copies = uploaded(values, dtype)
    assert all(torch.equal(target, value.to(dtype)) for target, value in zip(targets, values, strict=True))
    assert len(copies.buffers) <= 4, "two, and one for each slice that is larger than any before"


class AtOnce(LateCopies):
    """Copies have run when they are queued."""

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> None:
        target.copy_(staged)


def meta_folder(folder: Path) -> tuple[Path, int]:
    """One shard, whose parts of `wo` and `w2` have gaps on one rank of two."""
    return write(folder, split(random_weights(LARGE, dtype=torch.bfloat16), 1), LARGE), 640


def hugging_face_folder(folder: Path) -> tuple[Path, int]:
    config = CONFIGS["llama-biases"] | {"hidden_size": 1024, "intermediate_size": 2048}
    config |= {"num_hidden_layers": 1, "head_dim": 128}
    return write_hugging_face(folder, config, random_hugging_face(read(config), dtype=torch.bfloat16), 3), VOCAB_SIZE


def gguf_folder(folder: Path) -> tuple[Path, int]:
    return write_model(folder, encoding=Encoding.Q4_1), VOCABULARY


def loaded(folder: Path, vocab_size: int, rank: int, uploads: Uploads | None) -> dict[str, list[torch.Tensor | None]]:
    """Parts of one of two ranks; GGUF's in the groups in which they are stored."""
    source = open_checkpoint(folder)
    model = source.model_config(vocab_size)
    reader, share = source.open_weights(model), RankShare.of(model, rank, 2)

    def coding_of(name: str) -> str | None:
        stored = reader.stored_format(name)
        return stored if stored in CODINGS else None

    parts = planned_weights(reader, model, share, torch.float32, CPU, coding_of, uploads=uploads)
    return {name: [weight] if isinstance(weight, torch.Tensor) else list(weight) for name, weight in parts}


@pytest.mark.parametrize("make", [meta_folder, hugging_face_folder, gguf_folder])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_parts_read_by_threads_are_those_copied_from_maps(
    tmp_path: Path, make: Callable[[Path], tuple[Path, int]], num_threads: int
) -> None:
    folder, vocab_size = make(tmp_path)
    for rank in (0, 1):
        expected = loaded(folder, vocab_size, rank, None)
        uploads = Uploads(CPU, AtOnce(), 2**17, FileReads(num_threads))
        got = loaded(folder, vocab_size, rank, uploads)
        assert got.keys() == expected.keys()
        for name, parts in expected.items():
            for one, other in zip(got[name], parts, strict=True):
                assert one is other or (one is not None and other is not None and torch.equal(one, other)), name


def test_values_that_are_not_finite_are_named_at_the_end_where_copies_are_late(tmp_path: Path) -> None:
    """The host does not wait for the device after each weight. Two weights of two shards are at fault; the first is named."""
    shards = split(random_weights(WIDE), 2)
    shards[1]["layers.0.attention.wk.weight"][3, 5] = float("nan")
    shards[0]["layers.1.feed_forward.w1.weight"][0, 0] = float("inf")
    write(tmp_path, shards)
    source = open_checkpoint(tmp_path)
    model = source.model_config(640)
    names = list(weight_specs(model))
    for uploads, expected in (
        (None, names[: names.index("layers.0.attention.wk.weight")]),
        (Uploads(CPU, AtOnce()), names),
    ):
        parts = planned_weights(
            source.open_weights(model), model, RankShare.of(model, 0, 1), torch.float16, CPU, uploads=uploads
        )
        seen = [name for name, _ in itertools.islice(parts, len(expected))]
        with pytest.raises(CheckpointError, match=r"consolidated\.01\.pth: layers\.0\.attention\.wk\.weight holds"):
            next(parts)
        assert seen == expected
