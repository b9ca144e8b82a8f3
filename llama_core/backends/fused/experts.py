"""Mixtures of experts in torch. The loop over experts reads their numbers on the host, so a CUDA graph cannot capture it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llama_core.backends.fused.ops import TorchOps
from llama_core.backends.weight_formats.format import Bias, TorchMatrix
from llama_core.model.operations import Activation, Route

ExpertMatrices = Sequence[tuple[TorchMatrix, Bias]]  # of each expert


def expert_matrices(matrix: TorchMatrix, bias: Bias, count: int) -> ExpertMatrices:
    """Those of `count` experts, which lie one below the other in `matrix`, and their biases."""
    rows = len(matrix.held.codes) // count
    parts = [slice(expert * rows, (expert + 1) * rows) for expert in range(count)]
    return [(matrix.part(each), None if bias is None else bias[each]) for each in parts]


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer. router: [experts, dim]; router_bias: [experts] or None."""

    route: Route
    router: torch.Tensor
    router_bias: Bias
    gates: ExpertMatrices
    down: ExpertMatrices
    activation: Activation

    def apply(self, ops: TorchOps, x: torch.Tensor) -> torch.Tensor:
        """x [T, dim] -> this rank's part of the sum of each token's experts, [T, dim]. They are added in the order of their
        numbers."""
        chosen, weights = self.choose(x)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in torch.unique(chosen).tolist():
            tokens, places = torch.where(chosen == expert)
            (matrix, bias), (last, last_bias) = self.gates[expert], self.down[expert]
            factors = weights[tokens, places, None]
            inputs = x[tokens] * factors.type_as(x) if self.route.scales_inputs else x[tokens]
            result = last.multiply(ops.gated_product(inputs, matrix, bias, self.activation)).float()
            result = result if last_bias is None else result + last_bias
            total[tokens] += result if self.route.scales_inputs else result * factors
        return total.type_as(x)

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, int64 [T, top_k], in the order of their numbers, and their weights, or the factors of
        their inputs, float32."""
        logits = F.linear(
            x.float(), self.router.float(), None if self.router_bias is None else self.router_bias.float()
        )
        # A stable sort: of equal logits those with lower numbers.
        chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, : self.route.top_k].sort(-1).values
        if self.route.scales_inputs:
            return chosen, logits.gather(-1, chosen).sigmoid()
        if self.route.norm_topk:
            return chosen, logits.gather(-1, chosen).softmax(-1)
        return chosen, logits.softmax(-1).gather(-1, chosen)
