"""The Transformer in fairscale's model-parallel layers, as in Meta's reference, for several ranks with equal parts.

Only this file touches the process groups that fairscale keeps in module globals.
"""

import contextlib
import io
import logging
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from fairscale.nn.model_parallel import initialize
from fairscale.nn.model_parallel.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from fairscale.nn.model_parallel.mappings import reduce_from_model_parallel_region
from torch import nn

from llama_core.backends.fused.adapters import Adapted
from llama_core.backends.fused.model import FusedTransformer
from llama_core.backends.fused.ops import SlotTokens, StepClock
from llama_core.backends.fused.step_plan import StepTensors
from llama_core.backends.parallel import before_leaving
from llama_core.backends.weight_formats.format import TorchMatrix

log = logging.getLogger(__name__)

Layer = TypeVar("Layer", bound=nn.Module)


class FairscaleTransformer(FusedTransformer):
    """See `FusedTransformer`. Every matrix is held in the model's dtype; qkv and gate_up need no layer, because a rank keeps
    their outputs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _make_groups(self.parallel.world_size)
        plain = {"padding_idx": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
        self._embedding = _over(self._embeddings, ParallelEmbedding, **plain)
        self._whole_output = _over(self._output.held.codes, ColumnParallelLinear, gather_output=True)
        rows = [self._tensors[spec.tensor] for spec in self._specs.values() if spec.is_linear and spec.rank_dim == 1]
        self._rows = {id(matrix): _over(matrix.held.codes, _TimedRows) for matrix in rows}

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._divided(cast(torch.Tensor, self._whole_output(hidden_states)))

    def _embed(
        self, step: StepTensors, known: SlotTokens, block_size: int, clock: StepClock
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = known.block_tables[step.slots, step.positions // block_size]
        with clock.waiting():
            whole = self._embedding(known.tokens[step.slots, step.positions])
        return whole, blocks * block_size + step.positions % block_size

    def _sum_of_products(
        self, x: torch.Tensor, matrix: TorchMatrix, waiting: AbstractContextManager[None], lora: Adapted | None
    ) -> torch.Tensor:
        if lora is not None:
            return super()._sum_of_products(x, matrix, waiting, lora)
        return cast(torch.Tensor, self._rows[id(matrix)](x, waiting))


class _TimedRows(RowParallelLinear):  # type: ignore[misc]
    """fairscale's layer, whose sum is timed and its product is not."""

    def forward(self, x: torch.Tensor, waiting: AbstractContextManager[None]) -> torch.Tensor:
        partial = F.linear(x, self.weight)
        with waiting:
            return cast(torch.Tensor, reduce_from_model_parallel_region(partial))


def _over(weight: torch.Tensor, kind: type[Layer], **fields: Any) -> Layer:
    """A layer of fairscale over this rank's weight. fairscale's constructors make and fill the whole matrix on every rank."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name, value in {"weight": nn.Parameter(weight, requires_grad=False), "bias": None, **fields}.items():
        setattr(layer, name, value)
    return layer


def _make_groups(world_size: int) -> None:
    """Make the groups that fairscale's layers look up. A second call does nothing."""
    if not initialize.model_parallel_is_initialized():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):  # fairscale prints; a library should not
            initialize.initialize_model_parallel(world_size)
        log.debug("fairscale: %s", printed.getvalue().strip().replace("\n", "; "))
        before_leaving(initialize.destroy_model_parallel)
