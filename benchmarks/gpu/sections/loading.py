"""Weights from files to the device, as a rank loads them, by the number of reading threads.

The checkpoint has as many of the shape's layers as `sizes.loading_bytes` allow. It has just been written, so it lies in the
page cache.
"""

import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.clock import Clock, clock_of
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import Spread
from benchmarks.harness.make_checkpoint import SHAPES, random_weights, write_meta
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.files.meta_params import config_from_params
from llama_core.model.config import ModelConfig
from llama_core.model.share import RankShare
from llama_core.weights.loader import planned_weights
from llama_core.weights.uploads import FileReads, Uploads

GB = 1e9
_LAYER_VALUES = 12  # times dim squared
_ROUNDS = 3  # of which the first is left out: it allocates


def run(record: Recorder, settings: Settings) -> None:
    """GB/s, and processor seconds of the host for a GB."""
    sizes, clock = settings.sizes, clock_of(settings.device)
    ways = {f"threads_{count}": count for count in sizes.loading_threads}
    if record.has(*ways):
        return
    shape, dtype = SHAPES[settings.shape], getattr(torch, settings.dtype)
    layer_bytes = _LAYER_VALUES * shape.params["dim"] ** 2 * dtype.itemsize
    layers = max(1, min(shape.params["n_layers"], sizes.loading_bytes // layer_bytes))
    shape = replace(shape, params=shape.params | {"n_layers": layers})
    model = config_from_params(shape.params, vocab_size=settings.vocab_size, source=settings.shape)
    with tempfile.TemporaryDirectory(prefix="llama-gpu-bench-") as folder:
        write_meta(Path(folder), shape, random_weights(model, dtype, seed=0), tokenizer=None)
        for way, count in ways.items():
            record.measure(way, partial(_speed, clock, Path(folder), model, count))


def _speed(clock: Clock, folder: Path, model: ModelConfig, count: int) -> dict[str, object]:
    speeds, processor = [], []
    for _ in range(_ROUNDS):
        began, cpu_began = time.perf_counter(), time.process_time()
        num_gb = _load(clock, folder, model, count) / GB
        clock.synchronize()
        speeds.append(num_gb / (time.perf_counter() - began))
        processor.append((time.process_time() - cpu_began) / num_gb)
    return {"gb_s": Spread.of(speeds[1:]), "cpu_s_per_gb": Spread.of(processor[1:])}


def _load(clock: Clock, folder: Path, model: ModelConfig, count: int) -> int:
    """Bytes loaded."""
    reader = open_checkpoint(folder).open_weights(model)
    transfers = None if clock.device.type == "cuda" else _AtOnce()
    uploads = Uploads(clock.device, transfers, reads=FileReads(count))
    share = RankShare.of(model, 0, 1)
    weights = planned_weights(reader, model, share, reader.dtype, clock.device, uploads=uploads)
    return sum(weight.nbytes for _, weight in weights if isinstance(weight, torch.Tensor))


class _AtOnce:
    """Stands for a device's copies on a CPU."""

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> None:
        target.copy_(staged)

    def record(self) -> "_AtOnce":
        return self

    def synchronize(self) -> None:
        pass
