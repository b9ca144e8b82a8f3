"""Model-parallel layers for parts of any size: what fairscale's layers do where the parts are equal.

`LayerTypes` makes the layers of one model. A layer is built without memory for its weights, which are on the meta device.
"""

from collections.abc import Sequence as Seq
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from llama_core.checkpoint.rank_share import RankShare
from llama_core.execution.parallel import Parallel
from llama_core.execution.reference.stopwatch import Stopwatch, timed
from llama_core.model_config import ModelConfig


class LayerTypes(Protocol):
    """The layers of a model that ranks divide. `outputs` and `inputs` are full sizes, `own` is this rank's part of them."""

    def column(self, inputs: int, outputs: int, own: int, *, bias: bool = False) -> nn.Module:
        """x [T, inputs] -> this rank's outputs [T, own]."""

    def row(self, inputs: int, own: int, outputs: int, *, bias: bool = False) -> nn.Module:
        """This rank's inputs [T, own] -> [T, outputs], summed over all ranks; the bias is added once, after the sum."""

    def embedding(self) -> nn.Module:
        """Token ids [T] -> [T, dim], whole on every rank; ranks divide the columns."""

    def output(self) -> nn.Module:
        """x [R, dim] -> [R, vocab_size], whole on every rank; ranks divide the vocabulary."""


class OwnLayerTypes:
    """See `LayerTypes`: layers on the rank group of `parallel`, whose collectives `collectives` times."""

    def __init__(self, config: ModelConfig, parallel: Parallel, collectives: Stopwatch) -> None:
        self._config = config
        self._parallel = parallel
        self._collectives = collectives
        self._shares = [RankShare.of(config, rank, parallel.world_size) for rank in range(parallel.world_size)]

    def column(self, inputs: int, outputs: int, own: int, *, bias: bool = False) -> nn.Module:
        return nn.Linear(inputs, own, bias=bias, device="meta")

    def row(self, inputs: int, own: int, outputs: int, *, bias: bool = False) -> nn.Module:
        return RowParallelLinear(own, outputs, self._parallel, self._collectives, bias=bias)

    def embedding(self) -> nn.Module:
        widths = [len(share.columns) for share in self._shares]
        return ParallelEmbedding(self._config.vocab_size, widths, self._parallel, self._collectives)

    def output(self) -> nn.Module:
        widths = [len(share.vocab) for share in self._shares]
        return GatheredLinear(self._config.dim, widths, self._parallel, self._collectives)


class RowParallelLinear(nn.Module):
    """weight [outputs, own inputs]; the partial results of all ranks are added."""

    def __init__(self, inputs: int, outputs: int, parallel: Parallel, collectives: Stopwatch, *, bias: bool) -> None:
        super().__init__()
        self._sum = timed(parallel.sum, collectives)
        self.weight = _weight(outputs, inputs)
        self.bias = _weight(outputs) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self._sum(F.linear(x, self.weight))
        return whole if self.bias is None else whole + self.bias


class ParallelEmbedding(nn.Module):
    """weight [vocab_size, own columns]."""

    def __init__(self, vocab_size: int, widths: Seq[int], parallel: Parallel, collectives: Stopwatch) -> None:
        super().__init__()
        self._gather = timed(partial(parallel.gather_columns, widths=widths), collectives)
        self.weight = _weight(vocab_size, widths[parallel.rank])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._gather(F.embedding(tokens, self.weight))


class GatheredLinear(nn.Module):
    """weight [own outputs, inputs]; the outputs of all ranks are gathered."""

    def __init__(self, inputs: int, widths: Seq[int], parallel: Parallel, collectives: Stopwatch) -> None:
        super().__init__()
        self._gather = timed(partial(parallel.gather_columns, widths=widths), collectives)
        self.weight = _weight(widths[parallel.rank], inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._gather(F.linear(x, self.weight))


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
