"""Loads one rank's part of a checkpoint into the backend that computes it."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from llama_core.backends.backend import Backend
from llama_core.backends.backend_choice import (
    BackendKind,
    choose,
    dtype_text,
    holds,
    matrix_types,
    plan_stored,
    step_bytes_of,
)
from llama_core.backends.fused.backend import FusedBackend
from llama_core.backends.fused.buffers import DeviceSlots
from llama_core.backends.fused.device import choose_ops
from llama_core.backends.fused.model import FusedTransformer
from llama_core.backends.kv_cache import CacheShape, cache_dtype
from llama_core.backends.memory_budget import (
    check_weights_fit,
    fit_context,
    planned_weight_bytes,
)
from llama_core.backends.native import backend as native
from llama_core.backends.parallel import Parallel, device_name
from llama_core.backends.slots import SlotTable
from llama_core.backends.verify_files import FileChecks
from llama_core.backends.weight_plan import WeightPlan
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.config import EngineConfig
from llama_core.files.code import code_version
from llama_core.files.source import CheckpointSource, WeightReader
from llama_core.model.config import ModelConfig
from llama_core.model.share import RankShare, is_even
from llama_core.rank_report import RankReport
from llama_core.weights.loader import GroupedWeight, Progress, planned_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """What `load_rank` has made. config: with max_seq_len as memory allows it. slots: those that the backend reads.
    former_blocks: as given."""

    config: EngineConfig
    model_config: ModelConfig
    parallel: Parallel
    slots: SlotTable
    backend: Backend
    report: RankReport
    former_blocks: int


def load_rank(
    config: EngineConfig,
    parallel: Parallel,
    on_progress: Progress = lambda done, total: None,
    source: CheckpointSource | None = None,
    former_blocks: int = 0,
) -> LoadedRank:
    """Check the checkpoint, then read this rank's share. Every rank of the group calls this.

    source: `open_checkpoint`'s if absent. former_blocks: cache blocks of the ranks that this group replaces; on a GPU, loading
    waits for their memory.

    Raises ConfigError or CheckpointError before it allocates.
    """
    begin = time.perf_counter()
    source = source or open_checkpoint(config.ckpt_dir)
    checks = FileChecks(config, source, parallel)
    checks.verify_manifest()
    model = source.model_config(config.vocab_size)
    reader = source.open_weights(model)
    checks.verify_contents(reader)
    kind, dtype, plan = choose(config, model, reader, parallel)
    loading = _Loading(config, model, reader, parallel, dtype, plan, on_progress)
    loading.check_fits(kind, former_blocks)
    loading = replace(loading, config=loading.fitted_config(kind))
    backend: Backend
    slots: SlotTable
    if kind == "native":
        slots = SlotTable(loading.config, parallel.device)
        backend = native.NativeBackend(loading.config, model, parallel, slots, dtype, plan, loading.planned_weights())
    else:
        slots = DeviceSlots(loading.config, parallel.device)
        backend = loading.fused_backend(kind, slots)
    checks.verify_unchanged()
    report = RankReport(
        rank=parallel.rank,
        device=f"{device_name(parallel.device)}, {backend.name}",
        dtype=dtype_text(config, plan, reader.dtype),
        weight_bytes=backend.weight_bytes,
        load_seconds=time.perf_counter() - begin,
        share=RankShare.of(model, parallel.rank, parallel.world_size).describe(model),
        files_id=checks.files_id,
        digest=checks.digest,
        max_seq_len=loading.config.max_seq_len,
        numerics=_numerics(kind, parallel.device),
    )
    log.info(
        "rank %d of %d: %.1f MB of weights loaded in %.2f s on %s as %s; max_seq_len %d, max_batch_size %d, vocabulary %d",
        parallel.rank,
        parallel.world_size,
        report.weight_bytes / 1e6,
        report.load_seconds,
        report.device,
        report.dtype,
        report.max_seq_len,
        config.max_batch_size,
        config.vocab_size,
    )
    return LoadedRank(loading.config, model, parallel, slots, backend, report, former_blocks)


def _numerics(kind: BackendKind, device: torch.device) -> str:
    if kind != "torch" or device.type != "cpu":
        return code_version()
    cpu = {name: value for name, value in torch.cpu.get_capabilities().items() if not name.startswith("num_")}
    machine = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), sorted(cpu.items())
    return f"{code_version()} {machine}"


@dataclass(frozen=True, slots=True)
class _Loading:
    """One rank's load: how the group's ranks hold the weights that `reader` reads. dtype: of the activations."""

    config: EngineConfig
    model: ModelConfig
    reader: WeightReader
    parallel: Parallel
    dtype: torch.dtype
    plan: WeightPlan
    on_progress: Progress

    def check_fits(self, kind: BackendKind, former_blocks: int) -> None:
        """Raises ConfigError on every rank if the weights of any rank do not fit into its memory."""
        former_bytes = 0
        if former_blocks and self.parallel.device.type == "cuda":
            cached = cache_dtype(self.config, self.dtype)
            block_bytes = CacheShape.of(self.model, self.config.block_size, self.parallel, cached).block_bytes
            step_bytes = step_bytes_of(kind, self.parallel.device)(self.config, self.model, self.parallel, self.dtype)
            former_bytes = step_bytes + former_blocks * block_bytes
        check_weights_fit(planned_weight_bytes(self.model, self.plan, self.parallel), self.parallel, former_bytes)

    def fitted_config(self, kind: BackendKind) -> EngineConfig:
        """The configuration with max_seq_len lowered, where it may be, to what every rank's memory holds."""

        def plan_on(num_ranks: int) -> WeightPlan:
            group = replace(self.parallel, rank=0, world_size=num_ranks)
            found = plan_stored(self.config, self.model, self.reader, self.dtype, group, kind)
            return found if holds(kind, self.config, found) else found.expand()

        return fit_context(
            self.config, self.model, self.dtype, plan_on, self.parallel, step_bytes_of(kind, self.parallel.device)
        )

    def fused_backend(self, kind: BackendKind, slots: DeviceSlots) -> Backend:
        config, parallel, invariant = self.config, self.parallel, self.config.batch_invariant
        ops, device = choose_ops(kind, parallel.device, batch_invariant=invariant)
        with torch.inference_mode():
            common = self.model, parallel, config.max_seq_len, self.dtype, ops, matrix_types(self.plan)
            if (
                kind == "torch"
                and parallel.world_size > 1
                and self.plan.is_plain
                and is_even(self.model, parallel.world_size)
            ):
                # Imported here, because machines with GPUs may lack fairscale.
                from llama_core.backends.fused.fairscale_layers import FairscaleTransformer

                transformer: FusedTransformer = FairscaleTransformer(*common, self.planned_weights())
            else:
                transformer = FusedTransformer(*common, self.planned_weights(), batch_invariant=invariant)
        return FusedBackend(config, transformer, slots, device, kind)

    def planned_weights(self) -> Iterator[tuple[str, torch.Tensor | GroupedWeight]]:
        return planned_weights(
            self.reader,
            self.model,
            RankShare.of(self.model, self.parallel.rank, self.parallel.world_size),
            self.dtype,
            self.parallel.device,
            self.plan.coding_of,
            self.plan.quantizes,
            self.on_progress,
        )
