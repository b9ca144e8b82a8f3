"""The LoRA adapters of a rank in torch: their matrices in places, in one set of tensors for each matrix of a layer."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from llama_core.config import EngineConfig
from llama_core.model.config import ModelConfig
from llama_core.model.share import RankShare
from llama_core.model.weights import first_rows, weight_specs
from llama_core.weights.adapter import LowRank


@dataclass(frozen=True, slots=True)
class MatrixAdapters:
    """Of one matrix [outputs, inputs] that M weights share, such as q, k and v: a [places, M, ranks, inputs], b [places,
    outputs, ranks], scales float32 [places, M]; zeros where an adapter has no pair or a lower rank. bounds: the first output
    of each weight, and the number of outputs."""

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    bounds: tuple[int, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.a, self.b, self.scales

    def add_to(self, y: torch.Tensor, x: torch.Tensor, places: torch.Tensor) -> None:
        """y [T, outputs] += scale * b (a x) for x [T, inputs], summed in float32. places: int64 [T], from 1 on; 0 for tokens
        without an adapter."""
        for place in set(places.tolist()):
            if place:
                rows = (places == place).nonzero()[:, 0]
                a, b, scales = (each[place - 1].float() for each in self.tensors)
                wide, delta = x[rows].float(), []
                for i, (begin, end) in enumerate(pairwise(self.bounds)):
                    delta.append((wide @ a[i].T * scales[i]) @ b[begin:end].T)
                y[rows] = (y[rows].float() + torch.cat(delta, dim=1)).to(y.dtype)


class Adapted(NamedTuple):
    """The adapters of one matrix in one step. places: see `MatrixAdapters.add_to`."""

    adapters: MatrixAdapters
    places: torch.Tensor


class AdapterTables:
    """By the name of the matrix, such as "layers.0.qkv"."""

    def __init__(
        self, config: EngineConfig, model: ModelConfig, share: RankShare, dtype: torch.dtype, device: torch.device
    ) -> None:
        specs = weight_specs(model)
        self._first, shapes = first_rows(specs, share)
        self._tensor = {name: spec.tensor for name, spec in specs.items() if spec.takes_adapters}
        firsts: dict[str, list[int]] = {}
        for name, tensor in self._tensor.items():
            if tensor.startswith("layers."):
                firsts.setdefault(tensor, []).append(self._first[name])
        self.by_matrix: dict[str, MatrixAdapters] = {}
        for tensor, starts in firsts.items():
            (outputs, inputs), places, rank = shapes[tensor], config.max_loras, config.max_lora_rank
            a = torch.zeros((places, len(starts), rank, inputs), dtype=dtype, device=device)
            b = torch.zeros((places, outputs, rank), dtype=dtype, device=device)
            scales = torch.zeros((places, len(starts)), device=device)
            self.by_matrix[tensor] = MatrixAdapters(a, b, scales, (*starts, outputs))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for table in self.by_matrix.values() for tensor in table.tensors)

    def load(self, place: int, pairs: Iterable[LowRank]) -> None:
        """Give a place, from 1 on, this rank's part of an adapter."""
        for table in self.by_matrix.values():
            for tensor in table.tensors:
                tensor[place - 1].zero_()
        for name, a, b, scale in pairs:
            table, first = self.by_matrix[self._tensor[name]], self._first[name]
            module = table.bounds.index(first)
            table.a[place - 1, module, : len(a)].copy_(a)
            table.b[place - 1, first : first + len(b), : len(a)].copy_(b)
            table.scales[place - 1, module] = scale
