"""The engine with random weights that no file holds, and steps that are made by hand."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import torch

from benchmarks.gpu.settings import Settings
from benchmarks.harness.make_checkpoint import SHAPES
from llama_core.backends.fused.backend import FusedBackend
from llama_core.backends.parallel import alone
from llama_core.backends.runner import ModelRunner
from llama_core.config import CacheDType, Device, DType, EngineConfig
from llama_core.files.meta_params import config_from_params
from llama_core.files.source import CheckpointSource, Slice, WeightReader
from llama_core.model.config import ModelConfig
from llama_core.model.weights import Box
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit, StepInput

_RANDOM_VALUES = 2**24  # that all weights are cut from
_SLICE_VALUES = 2**21
_CPU_CACHE_BYTES = 2**26


def model_of(settings: Settings) -> ModelConfig:
    return config_from_params(SHAPES[settings.shape].params, vocab_size=settings.vocab_size, source=settings.shape)


class RandomWeights(CheckpointSource):
    """A checkpoint of random values, made when they are read: speed does not depend on them."""

    files: Sequence[Path] = ()
    metadata_files: Sequence[Path] = ()
    stop_ids: frozenset[int] = frozenset()

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype

    def owns(self, name: str) -> bool:
        return False

    def num_shards(self) -> int:
        return 1

    def model_config(self, vocab_size: int) -> ModelConfig:
        return self._model

    def open_weights(self, config: ModelConfig) -> WeightReader:
        return _RandomReader(self._dtype)


class _RandomReader(WeightReader):
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._values = torch.randn(_RANDOM_VALUES, generator=torch.Generator().manual_seed(0))
        self._scaled: dict[int, torch.Tensor] = {}
        self._place = 0

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def slices(self, name: str, box: Box) -> Iterator[Slice]:
        if len(box.shape) == 1:
            values = 1 + 0.1 * self._values[: box.shape[0]]
            yield Slice(Path("random"), values.to(self._dtype), (0,))
            return
        rows, columns = box.shape
        many = self._of(columns if name != "tok_embeddings.weight" else 1)
        at_once = max(1, _SLICE_VALUES // columns)
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            self._place = (self._place + 7_919) % (len(many) - count * columns)
            part = many[self._place : self._place + count * columns]
            yield Slice(Path("random"), part.view(count, columns), (first, 0))

    def _of(self, inputs: int) -> torch.Tensor:
        """The values, as large as keep outputs about as large as inputs."""
        if inputs not in self._scaled:
            self._scaled[inputs] = (self._values * inputs**-0.5).to(self._dtype)
        return self._scaled[inputs]

    def verify_checksums(self, index: int, count: int) -> None:
        pass


@dataclass(frozen=True)
class Engine:
    """A runner with its cache. load_s, ready_s: of loading, and of the cache, graphs and the first steps."""

    runner: ModelRunner
    num_blocks: int
    load_s: float
    ready_s: float

    @cached_property
    def model(self) -> ModelConfig:
        return self.runner.model_config

    @property
    def split(self) -> dict[str, float]:
        """Seconds of the parts of the start."""
        assert isinstance(self.runner.backend, FusedBackend)
        return {f"{name}_s": seconds for name, seconds in self.runner.backend.start_seconds.items()}

    def step_bytes(self, rows: int, context: float) -> int:
        """Bytes that a decode step reads: every weight, but of the embedding a row each, and the cache of all rows."""
        model, config, itemsize = self.model, self.runner.config, int(getattr(torch, self.runner.config.dtype).itemsize)
        embedding = (model.vocab_size - rows) * model.dim * itemsize
        position = 2 * model.n_layers * model.kv_width * (1 if config.kv_cache_dtype == "fp8" else itemsize)
        return self.runner.report.weight_bytes - embedding + int(rows * context * position)

    def context_for(self, rows: int, wanted: int) -> int:
        """Cached positions of each of `rows` sequences, as many as wanted or as the cache holds."""
        block_size = self.runner.config.block_size
        return min(wanted, self.num_blocks // rows * block_size - 2)


def open_engine(
    settings: Settings,
    max_seq_len: int,
    max_batch_size: int,
    max_step_tokens: int = 2048,
    *,
    ckpt: Path | None = None,
    kv_cache_bytes: int | None = None,
    batch_invariant: bool = False,
    former_blocks: int = 0,
) -> Engine:
    """The fused backend, ready for steps. ckpt: a checkpoint of the shape; random weights if absent. former_blocks: of the
    cache of the process that this one replaces."""
    model = model_of(settings)
    config = EngineConfig(
        ckpt_dir=str(ckpt or settings.shape),
        vocab_size=settings.vocab_size,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        max_step_tokens=max(max_step_tokens, max_batch_size),
        device=cast(Device, settings.device),
        dtype=cast(DType, settings.dtype),
        backend="fused",
        kv_cache_bytes=kv_cache_bytes or (_CPU_CACHE_BYTES if settings.device == "cpu" else None),
        verify_checksums=False,
        speculation=False,
        prefix_caching=False,
        batch_invariant=batch_invariant,
        quantization=settings.quantization,
        kv_cache_dtype=cast(CacheDType, settings.kv_cache_dtype),
    )
    begin = time.perf_counter()
    source = RandomWeights(model, getattr(torch, settings.dtype)) if ckpt is None else None
    runner = ModelRunner.load(config, alone(config.device), source=source, former_blocks=former_blocks)
    loaded = time.perf_counter()
    num_blocks = runner.max_num_blocks()
    runner.allocate_cache(num_blocks)
    runner.warm_up()
    return Engine(runner, num_blocks, loaded - begin, time.perf_counter() - loaded)


class HandMadeSteps:
    """Steps of `rows` sequences, each with `context` cached positions, whose blocks do not overlap."""

    def __init__(self, engine: Engine, rows: int, context: int, temperature: float = 0.0) -> None:
        self._engine, self._context, self._temperature = engine, context, temperature
        config = engine.runner.config
        self._blocks = -(-(context + 2) // config.block_size)
        assert rows * self._blocks <= engine.num_blocks, "the cache holds the sequences"
        self._admit: list[SlotInit] = [self._init(slot, context + 1, slot * self._blocks) for slot in range(rows)]
        self._rows = [Row(slot, context, 1, True) for slot in range(rows)]
        self._number = 0

    def decode(self) -> StepInput:
        """All rows decode; their caches hold whatever lay there, which takes as long."""
        self._number += 1
        admit, self._admit = self._admit, []
        return StepInput(0, self._number, self._rows, admit=admit)

    def with_prompt(self, length: int) -> StepInput:
        """All rows decode beside a new prompt of `length` tokens, computed in one chunk."""
        step, slot = self.decode(), len(self._rows)
        init = self._init(slot, length, slot * self._blocks)
        return StepInput(0, step.step, [*step.rows, Row(slot, 0, length, True)], admit=[*step.admit, init])

    def _init(self, slot: int, length: int, first_block: int) -> SlotInit:
        config = self._engine.runner.config
        count = -(-(length + 1) // config.block_size)
        blocks = [block % self._engine.num_blocks for block in range(first_block, first_block + count)]
        tokens = [3 + (7 * i + slot) % (config.vocab_size - 3) for i in range(length)]
        params = SamplingParams(temperature=self._temperature, top_p=0.9, seed=slot)
        return SlotInit(slot, tokens, blocks, params)
