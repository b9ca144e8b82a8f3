"""The layers of fairscale, and the process groups that fairscale keeps in module globals. Only this file touches them."""

import contextlib
import io
import logging
from unittest.mock import patch

import torch
from fairscale.nn.model_parallel import initialize, layers, mappings
from fairscale.nn.model_parallel.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from torch import nn

from llama_core.execution.parallel import Parallel, before_leaving, join_alone
from llama_core.execution.reference.stopwatch import Stopwatch, timed
from llama_core.model_config import ModelConfig

log = logging.getLogger(__name__)


class FairscaleLayerTypes:
    """See `layers.LayerTypes`: for ranks with equal parts. `collectives` times those of all models in this process."""

    def __init__(self, config: ModelConfig, parallel: Parallel, collectives: Stopwatch) -> None:
        self._config = config
        _make_groups(parallel)
        _time_collectives(collectives)

    def column(self, inputs: int, outputs: int, own: int, *, bias: bool = False) -> nn.Module:
        with _without_values():
            return _weightless(ColumnParallelLinear(inputs, outputs, bias=bias, gather_output=False))

    def row(self, inputs: int, own: int, outputs: int, *, bias: bool = False) -> nn.Module:
        with _without_values():
            return _weightless(RowParallelLinear(inputs, outputs, bias=bias, input_is_parallel=True))

    def embedding(self) -> nn.Module:
        with _without_values():
            return _weightless(ParallelEmbedding(self._config.vocab_size, self._config.dim))

    def output(self) -> nn.Module:
        with _without_values():
            return _weightless(ColumnParallelLinear(self._config.dim, self._config.vocab_size, bias=False))


def _make_groups(parallel: Parallel) -> None:
    """Make the groups that fairscale's layers look up when they are built. A second call does nothing."""
    join_alone(parallel)
    if not initialize.model_parallel_is_initialized():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):  # fairscale prints; a library should not
            initialize.initialize_model_parallel(parallel.world_size)
        log.debug("fairscale: %s", printed.getvalue().strip().replace("\n", "; "))
        before_leaving(initialize.destroy_model_parallel)


def _time_collectives(stopwatch: Stopwatch) -> None:
    """The layers look these functions up in their module at each call."""
    for name in ("reduce_from_model_parallel_region", "gather_from_model_parallel_region"):
        setattr(layers, name, timed(getattr(mappings, name), stopwatch))


def _without_values() -> contextlib.AbstractContextManager[object]:
    """fairscale would initialize every full weight on every rank and keep a slice, which the checkpoint then replaces."""
    return patch.object(layers, "_initialize_affine_weight", lambda *args, **kwargs: None)


def _weightless(layer: nn.Module) -> nn.Module:
    for name, weight in list(layer.named_parameters(recurse=False)):
        setattr(layer, name, nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False))
    return layer
