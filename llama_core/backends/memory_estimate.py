"""The memory that each rank will need, from the headers of a checkpoint's files. Loads no weight."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import torch

from llama_core.backends.backend_choice import BackendKind, choose, step_bytes_of
from llama_core.backends.kv_cache import cache_dtype
from llama_core.backends.memory_budget import LEAST_CONTEXT, layer_block_bytes, planned_weight_bytes
from llama_core.backends.native import backend as native
from llama_core.backends.parallel import Parallel, resolve_device
from llama_core.backends.weight_formats.matrices import find_weight_format
from llama_core.backends.weight_plan import WeightPlan
from llama_core.checkpoint.registry import checkpoint_path, format_name, open_checkpoint
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.files.hf.quantization import read_quantization
from llama_core.files.json_fields import read_object
from llama_core.files.source import DENSE, CheckpointSource, Slice, WeightReader
from llama_core.model.config import ModelConfig
from llama_core.model.fields import Fields
from llama_core.model.weights import OUTPUT, Box, weight_specs
from llama_core.scheduling.sliding_window import SlidingWindow
from llama_core.sizes import format_bytes
from llama_core.text.registry import find_tokenizer, load_tokenizer

# What a rank process takes beyond an empty one whatever the model: pages of libraries that are first touched when weights load
# and steps run, and thread stacks. Measured with tests/programs/estimate.py.
PROCESS_BYTES: Final = 8 * 10**6
_EXPANDED: Final = 1.1


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank: its weights, its cache with every block written, and what a step takes beside them."""

    rank: int
    weights: int
    cache: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working


@dataclass(frozen=True)
class MemoryEstimate:
    """Of `num_ranks` ranks with `config`. backend, dtype and plan: as the ranks would choose them on this machine."""

    config: EngineConfig
    model: ModelConfig
    num_ranks: int
    device: torch.device
    backend: BackendKind
    dtype: torch.dtype
    plan: WeightPlan

    @cached_property
    def ranks(self) -> list[RankMemory]:
        """One entry a rank. Rank 0 also samples."""
        return [self._of(self.config, rank) for rank in range(self.num_ranks)]

    def largest(self, max_seq_len: int, max_batch_size: int) -> RankMemory:
        """The memory of the rank that needs most, with another context and another number of sequences."""
        step = max(self.config.max_step_tokens, max_batch_size)
        config = replace(
            self.config,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
            max_step_tokens=step,
            kv_cache_bytes=None,
        )
        return max((self._of(config, rank) for rank in range(self.num_ranks)), key=lambda one: one.total)

    @property
    def expansion(self) -> str:
        """Says so where weights, each counted once, take more memory than in their files; "" where they do not."""
        source = open_checkpoint(self.config.ckpt_dir)
        stored = sum(file.stat().st_size for file in source.files)
        bytes_of = {name: find_weight_format(name).bytes_per_weight for name in (self.plan.dtype, *self.plan.formats)}
        specs = {
            name: spec
            for name, spec in weight_specs(self.model).items()
            if not (self.model.tied_embeddings and name == OUTPUT)
        }
        held = sum(math.prod(spec.shape) * bytes_of[self.plan.format_of(name)] for name, spec in specs.items())
        if held <= _EXPANDED * stored or not _has_weights(source):
            return ""
        return f"the files' {format_bytes(stored)} are held in {format_bytes(round(held))}, as {self.plan}"

    @property
    def block_bytes(self) -> int:
        """Of one cache block in all layers, on the rank that needs most."""
        return max(map(self._block_bytes, self._group()))

    @property
    def least_cache(self) -> int:
        """Cache bytes of one sequence of full length on the rank that needs most; with less, ranks refuse to start."""
        window = self._window(self.config)
        return max(window.num_held(self.config.max_seq_len) * self._block_bytes(at) for at in self._group())

    def _group(self) -> list[Parallel]:
        return [Parallel(rank, self.num_ranks, self.device) for rank in range(self.num_ranks)]

    def _window(self, config: EngineConfig) -> SlidingWindow:
        return SlidingWindow.of(self.model.longest_window, config.block_size, config.max_step_tokens)

    def _block_bytes(self, at: Parallel) -> int:
        held = cache_dtype(self.config, self.dtype)
        return self.model.n_layers * layer_block_bytes(self.config.block_size, self.model, held, at)

    def _of(self, config: EngineConfig, rank: int) -> RankMemory:
        at = Parallel(rank, self.num_ranks, self.device)
        block_bytes = self._block_bytes(at)
        # A full batch of full-length sequences, and the block that the scheduler holds in reserve for each.
        num_blocks = (self._window(config).num_held(config.max_seq_len) + 1) * config.max_batch_size
        if config.kv_cache_bytes is not None:
            num_blocks = min(num_blocks, config.kv_cache_bytes // block_bytes)
        weights, working = self._engine_bytes(config, at)
        slots = 8 * config.max_batch_size * (config.max_seq_len + config.blocks_per_sequence)
        return RankMemory(rank, weights, num_blocks * block_bytes, working + slots + PROCESS_BYTES)

    def _engine_bytes(self, config: EngineConfig, at: Parallel) -> tuple[int, int]:
        if self.backend == "native":
            threads = max(1, torch.get_num_threads() // self.num_ranks)
            return native.planned_bytes(config, self.model, at, self.dtype, self.plan, threads)
        working = step_bytes_of(self.backend, at.device)(config, self.model, at, self.dtype)
        return planned_weight_bytes(self.model, self.plan, at), working


def estimate_memory(config: EngineConfig, num_ranks: int, device: torch.device | None = None) -> MemoryEstimate:
    """Read the headers of `config.ckpt_dir` and plan. Raises ConfigError or CheckpointError, as the start of a rank would, but
    takes config.json's word for weights that a Hugging Face folder lacks.

    device: the configuration's if absent. It need not exist.
    """
    source = open_checkpoint(config.ckpt_dir)
    model = source.model_config(config.vocab_size)
    model.check_world_size(num_ranks)
    has_weights = _has_weights(source)
    reader = source.open_weights(model) if has_weights else _NoWeights(Path(config.ckpt_dir) / "config.json", model)
    alone = Parallel(0, 1, device or resolve_device(config.device))
    group = replace(alone, world_size=num_ranks)
    kind, dtype, plan = choose(config, model, reader, group, voters=alone)
    return MemoryEstimate(config, model, num_ranks, alone.device, kind, dtype, plan)


def _has_weights(source: CheckpointSource) -> bool:
    return format_name(source) != "hugging_face" or len(source.files) > len(source.metadata_files)


def at_least_context(config: EngineConfig) -> EngineConfig:
    """The configuration with the shortest context to which the ranks would lower it; the same where they may not."""
    return replace(config, max_seq_len=min(config.max_seq_len, LEAST_CONTEXT)) if config.lowers_max_seq_len else config


def describe_checkpoint(path: str | Path, tokenizer: str | Path | None = None) -> tuple[Path, ModelConfig, int]:
    """The checkpoint's file or folder, its architecture, and its number of shards.

    tokenizer: a file or folder; what lies at `path` if absent. Only Meta's files need one. Raises CheckpointError, ConfigError
    or TokenizerError: an unsupported family before anything else.
    """
    ckpt = checkpoint_path(path)
    source = open_checkpoint(ckpt)
    if (num_rows := source.num_rows()) is not None:
        return ckpt, source.model_config(num_rows), 1
    num_shards = source.num_shards()  # first: says what is wrong with a path of no known format
    found = find_tokenizer(tokenizer or ckpt)
    if not found.is_file():
        raise ConfigError(
            f"{found}: no such file: the tokenizer says the size of this checkpoint's vocabulary: give --tokenizer",
            param="tokenizer_path",
        )
    return ckpt, source.model_config(load_tokenizer(found).n_words), num_shards


class _NoWeights(WeightReader):
    """Of a Hugging Face folder without weights: what config.json says of them."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        self._specs, self._is_tied = weight_specs(model), model.tied_embeddings
        self._given = Fields(read_object(path), str(path))
        self._quantization = read_quantization(self._given)

    @property
    def dtype(self) -> torch.dtype:
        """transformers 5 calls it `dtype`, transformers 4 `torch_dtype`; bfloat16 if neither is there."""
        name = self._given.text("dtype", self._given.text("torch_dtype", "bfloat16"))
        return {"float16": torch.float16, "float32": torch.float32}.get(name, torch.bfloat16)

    def slices(self, name: str, box: Box) -> Iterator[Slice]:
        raise LookupError(f"{name}: the folder has no weights")

    def stored_format(self, name: str) -> str:
        """If float16 holds the scales, as it nearly always does."""
        spec = self._specs[name]
        is_tied = name == OUTPUT and self._is_tied
        if self._quantization is None or not spec.is_linear or is_tied:
            return DENSE
        coding = self._quantization.coding(spec.hugging_face.removesuffix(".weight"))
        return DENSE if coding is None else coding.stored_format(spec.shape[1])
