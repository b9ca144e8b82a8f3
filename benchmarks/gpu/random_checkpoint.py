"""A checkpoint of random weights on the disk, for sections whose processes load one."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.gpu.engine import model_of
from benchmarks.gpu.recorder import Unavailable
from benchmarks.gpu.settings import Settings
from benchmarks.harness.make_checkpoint import SHAPES, random_weights, write_meta


@contextmanager
def random_checkpoint(settings: Settings) -> Iterator[str]:
    """The folder of the settings' shape and dtype, which is removed afterwards. Raises Unavailable where it does not fit."""
    model, dtype = model_of(settings), getattr(torch, settings.dtype)
    with tempfile.TemporaryDirectory(prefix="llama-gpu-bench-") as folder:
        need = 2 * model.n_layers * 12 * model.dim**2
        if shutil.disk_usage(folder).free < need:
            raise Unavailable(f"a checkpoint of {need / 1e9:.0f} GB does not fit into {folder}")
        write_meta(Path(folder), SHAPES[settings.shape], random_weights(model, dtype, seed=0), tokenizer=None)
        yield folder
