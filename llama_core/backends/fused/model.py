"""One rank's part of the Transformer: the operations of its layers, over tensors. No call waits, so that a CUDA graph can
capture a whole step.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from llama_core.backends.fused.adapters import Adapted, AdapterTables
from llama_core.backends.fused.experts import Experts, expert_matrices
from llama_core.backends.fused.ops import HeadChanges, HeadNorms, RowNorm, SlotTokens, StepClock, TorchOps
from llama_core.backends.fused.step_plan import StepTensors
from llama_core.backends.kv_cache import KVCache
from llama_core.backends.parallel import Parallel
from llama_core.backends.rotary import rotary_table
from llama_core.backends.slots import SlotTable
from llama_core.backends.weight_formats.format import Bias, TorchMatrix, TorchMatrixType
from llama_core.model.config import ModelConfig
from llama_core.model.operations import (
    Activation,
    Add,
    Again,
    Attend,
    ExpertSum,
    GatedExperts,
    GatedLinear,
    Linear,
    Norm,
    Operation,
    Rotate,
    Route,
    TokenGate,
    Weight,
)
from llama_core.model.share import RankShare
from llama_core.model.weights import FINAL_NORM, first_rows, weight_specs
from llama_core.weights.loader import GroupedWeight


@dataclass(frozen=True, slots=True)
class _Pass:
    """One step on its way through the layers. residual: [T, dim]. places: int64 [T], of the tokens' LoRA adapters, 0 for none;
    None where no token has one. gates: [T, H head_dim] of the attention that follows, if it is gated. normed: [T, dim], what
    the next `Again` and `TokenGate` take."""

    residual: torch.Tensor
    step: StepTensors
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    cache: KVCache
    clock: StepClock
    places: torch.Tensor | None
    gates: list[torch.Tensor] = field(default_factory=list)
    normed: list[torch.Tensor] = field(default_factory=list)


# One or several operations: a method of `FusedTransformer` and its first arguments. The last two are the step's `_Pass` and the
# value before the operations; the result is the value after them.
_Compiled = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


class _Product(NamedTuple):
    """A matrix by its name, such as "layers.0.qkv", and its bias. is_timed: the clock gets the time of the ranks' sum."""

    name: str
    matrix: TorchMatrix
    bias: Bias
    is_timed: bool


class FusedTransformer:
    """This rank's weights and their computation: `hidden_states` for the layers, then `logits` for some of the tokens."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallel,
        max_seq_len: int,
        dtype: torch.dtype,
        ops: TorchOps,
        matrix_type: Callable[[str], TorchMatrixType],
        weights: Iterable[tuple[str, torch.Tensor | GroupedWeight]],
        *,
        batch_invariant: bool = False,
    ) -> None:
        """`matrix_type`: the type of a matrix by its name: such as "layers.0.qkv", or "output". `weights`: those of
        `load`, which may also be called later. `batch_invariant`: the bits of a token's hidden states do not depend on the
        number of tokens; `ops` must keep that too.
        """
        self.config = config
        self.dtype = dtype
        self.parallel = parallel
        self.ops = ops
        self._sum_over_ranks = parallel.sum_in_rank_order if batch_invariant else parallel.sum
        self._shares = [RankShare.of(config, rank, parallel.world_size) for rank in range(parallel.world_size)]
        self.share = self._shares[parallel.rank]
        self.head_dim = config.head_dim
        self.n_heads, self.n_kv_heads = len(self.share.heads), len(self.share.kv_heads)
        self._specs = weight_specs(config)
        self._first_rows, shapes = first_rows(self._specs, self.share)
        linear = {spec.tensor for spec in self._specs.values() if spec.is_linear}
        offsets = {spec.tensor for spec in self._specs.values() if spec.offset}
        self._tensors: dict[str, Any] = {
            name: matrix_type(name)(*shape, dtype, parallel.device, batch_invariant=batch_invariant)
            if name in linear
            else torch.empty(shape, dtype=torch.float32 if name in offsets else dtype, device=parallel.device)
            for name, shape in shapes.items()
        }
        self._embeddings, self._output = self._tensors["tok_embeddings"], self._tensors["output"]
        self.adapters: AdapterTables | None = None
        self._rotary = {each: rotary_table(each, self.head_dim, max_seq_len, parallel.device) for each in config.angles}
        self._plain_factors = torch.ones(max(config.dim, config.head_dim), dtype=dtype, device=parallel.device)
        self._square_columns = [torch.tensor(each, device=parallel.device) for each in self._columns_of_heads()]
        self._program = list(self._compile())
        self.load(weights)

    def _columns_of_heads(self) -> tuple[list[int], list[int]]:
        """Where each query head, and each key head, stands when all ranks' q and k lie side by side."""
        q_columns: dict[int, int] = {}
        k_columns: dict[int, int] = {}
        first = 0
        for share in self._shares:
            for columns, heads in ((q_columns, share.heads), (k_columns, share.kv_heads)):
                for i, head in enumerate(heads):
                    columns.setdefault(head, first + i)
                first += len(heads)
        return [q_columns[head] for head in sorted(q_columns)], [k_columns[head] for head in sorted(k_columns)]

    def load(self, weights: Iterable[tuple[str, torch.Tensor | GroupedWeight]]) -> None:
        """Copy this rank's part of each weight into its tensor. Weights have Meta's names, and are in `dtype` or in groups."""
        for name, weight in weights:
            tensor, first = self._tensors[self._specs[name].tensor], self._first_rows[name]
            if isinstance(tensor, TorchMatrix):
                tensor.set_rows(first, weight)
            else:
                assert isinstance(weight, torch.Tensor)
                tensor[first : first + len(weight)].copy_(weight).add_(self._specs[name].offset)

    @property
    def weight_bytes(self) -> int:
        return sum(getattr(tensor, "held", tensor).nbytes for tensor in self._tensors.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept beside the weights: rotary tables, and adapters."""
        tables = sum(table.nbytes for table in self._rotary.values())
        return tables + (0 if self.adapters is None else self.adapters.nbytes)

    def hidden_states(
        self, step: StepTensors, slots: SlotTable, cache: KVCache, clock: StepClock, *, adapted: bool
    ) -> torch.Tensor:
        """The last layer's normed hidden states [T, dim]. adapted: some token may have a LoRA adapter.

        Each layer attends after it has written its keys and values to the cache. `clock` gets the time in two collectives: that
        of the embeddings, where a rank waits for ranks that began the step later, and those of one layer, which stand for all
        layers because each reading of the clock is a kernel.
        """
        places = slots.adapter_places[step.slots] if adapted else None
        known = SlotTokens(slots.tokens, slots.block_tables)
        h, slot_mapping = self._embed(step, known, cache.keys.shape[2], clock)
        if self.config.embedding_multiplier != 1.0:
            h *= torch.full((), self.config.embedding_multiplier, dtype=h.dtype, device=h.device)
        if self.config.norms_embedding:
            h = self.ops.add_norm(h, None, RowNorm(self._plain_factors[: self.config.dim], self.config.norm_eps))
        way, x = _Pass(h, step, slot_mapping, known.block_tables, cache, clock, places), h
        for compute, arguments in self._program:
            x = compute(self, *arguments, way, x)
        return x

    def _compile(self) -> Iterator[_Compiled]:
        """The operations of all layers and the last norm. A sum that is added to the residual and then normed is one operation,
        which kernels fuse with its product."""
        end = self.config.n_layers
        left: list[tuple[int, Operation]] = [(i, each) for i, layer in enumerate(self.config.layers) for each in layer]
        left.append((end, Norm(FINAL_NORM)))
        while left:
            (i, operation), *following = left[:3]
            done = 1
            match operation, *(each for _, each in following):
                case Linear(is_summed=True) as linear, Add(1.0), Norm() as after:
                    norm = self._row_norm(following[1][0], after)
                    yield FusedTransformer._add_product_norm, (self._product(i, linear), norm)
                    done = 3
                case Linear(is_summed=True) as linear, *_:
                    yield FusedTransformer._sum, (self._product(i, linear),)
                case Linear() as linear, Rotate() as how, *_:
                    product = self._product(i, linear)
                    yield FusedTransformer._rotate, (product, i, how, self._head_changes(i, product, how))
                    done = 2
                case Norm() as norm, *_:
                    yield FusedTransformer._norm, (self._row_norm(i, norm),)
                case Attend() as how, *_:
                    yield FusedTransformer._attend, (i, how, how.sinks and self._held(i, how.sinks))
                case GatedLinear() as linear, *_:
                    yield FusedTransformer._gate, (self._product(i, linear), linear.activation)
                case Route() as route, GatedExperts() as gates, ExpertSum() as down:
                    yield FusedTransformer._sum_experts, (self._experts(i, route, gates, down),)
                    done = 3
                case Add(multiplier), *_:
                    yield FusedTransformer._add, (multiplier,)
                case Again(), *_:
                    yield FusedTransformer._again, ()
                case TokenGate(weight), *_:
                    yield FusedTransformer._gate_tokens, (self._held(i, weight),)
                case _:
                    raise AssertionError(f"layer {i}: {operation}")
            left = left[done:]
            if left and isinstance(left[0][1], Route) and Again() in self.config.layers[left[0][0]]:
                yield FusedTransformer._keep, ()

    def _held(self, layer: int, weight: Weight, kind: str = "weight") -> Any:
        """The tensor that holds a weight or bias, of experts those of all; None for a bias that it lacks."""
        begin = f"layers.{layer}." if layer < self.config.n_layers else ""
        spec = self._specs.get(f"{begin}{weight.name.format(0)}.{kind}")
        return None if spec is None else self._tensors[spec.tensor]

    def _row_norm(self, layer: int, norm: Norm) -> RowNorm:
        return RowNorm(self._held(layer, norm.weight), norm.eps or self.config.norm_eps)

    def _head_changes(self, layer: int, product: _Product, how: Rotate) -> HeadChanges:
        norms = None
        if how.norms is not None:
            q, k = (self._held(layer, each) for each in how.norms)
            norms = HeadNorms(q, k, self.config.norm_eps)
        elif how.has_plain_norms:
            factors = self._plain_factors[: self.head_dim]
            norms = HeadNorms(factors, factors, self.config.norm_eps)
        return HeadChanges(product.bias, norms, self._rotary.get(how.queries), self._rotary.get(how.keys))

    def _product(self, layer: int, linear: Linear | GatedLinear) -> _Product:
        first, is_timed = linear.parts[0], layer == self.config.n_layers // 2
        return _Product(
            f"layers.{layer}.{linear.tensor}", self._held(layer, first), self._held(layer, first, "bias"), is_timed
        )

    def _norm(self, norm: RowNorm, way: _Pass, x: torch.Tensor) -> torch.Tensor:
        return self.ops.add_norm(x, None, norm)

    def _rotate(
        self, product: _Product, layer: int, how: Rotate, changes: HeadChanges, way: _Pass, x: torch.Tensor
    ) -> torch.Tensor:
        qkv = self.ops.add_adapters(self.ops.product(x, product.matrix), x, self._adapted(product, way))
        heads = qkv.view(len(x), -1, self.head_dim)
        num_heads = self.n_heads + 2 * self.n_kv_heads
        if heads.shape[1] > num_heads:
            if changes.bias is not None:
                heads, changes = heads + changes.bias.view(heads.shape[1:]), changes._replace(bias=None)
            way.gates.append(heads[:, num_heads:].flatten(1))
            heads = heads[:, :num_heads].contiguous()
        if how.norms_all_heads:
            heads, changes = self._norm_all_heads(heads, changes), changes._replace(bias=None, norms=None)
        places = way.step.positions, way.slot_mapping
        return self.ops.rotate_and_store(heads, changes, *places, way.cache.layer(layer))

    def _norm_all_heads(self, heads: torch.Tensor, changes: HeadChanges) -> torch.Tensor:
        """qkv [T, H + 2 K, head_dim] with its biases, and RMSNorm of all ranks' heads of q and of k together, whose squares are
        added in the order of the heads."""
        assert changes.norms is not None
        if changes.bias is not None:
            heads = heads + changes.bias.view(heads.shape[1:])
        ends = self.n_heads, self.n_heads + self.n_kv_heads
        wide = heads[:, : ends[1]].float()
        widths = [len(share.heads) + len(share.kv_heads) for share in self._shares]
        squares = self.parallel.gather_columns(wide.pow(2).sum(-1), widths)
        parts = []
        q_columns, k_columns = self._square_columns
        for begin, end, columns, weight in (
            (0, ends[0], q_columns, changes.norms.q),
            (*ends, k_columns, changes.norms.k),
        ):
            mean = squares[:, columns].sum(-1) / (len(columns) * self.head_dim)
            normed = (wide[:, begin:end] * torch.rsqrt(mean + changes.norms.eps)[:, None, None]).type_as(heads)
            parts.append((normed * weight.view(-1, self.head_dim)).type_as(heads))
        return torch.cat((*parts, heads[:, ends[1] :]), dim=1)

    def _attend(self, layer: int, how: Attend, sinks: torch.Tensor | None, way: _Pass, x: torch.Tensor) -> torch.Tensor:
        attended = self.ops.attend(x, way.cache.layer(layer), way.block_tables, way.step.tiles, how, sinks).flatten(1)
        return attended * way.gates.pop().sigmoid() if how.is_gated else attended

    def _gate(self, product: _Product, activation: Activation, way: _Pass, x: torch.Tensor) -> torch.Tensor:
        lora = self._adapted(product, way)
        if lora is None:
            return self.ops.gated_product(x, product.matrix, product.bias, activation)
        gate_up = self.ops.add_adapters(self.ops.product(x, product.matrix), x, lora)
        return self.ops.gate(gate_up, product.bias, activation)

    def _add(self, multiplier: float, way: _Pass, x: torch.Tensor) -> torch.Tensor:
        residual = way.residual
        residual += x if multiplier == 1.0 else x * multiplier
        return residual

    def _keep(self, way: _Pass, x: torch.Tensor) -> torch.Tensor:
        way.normed[:] = [x]
        return x

    def _again(self, way: _Pass, x: torch.Tensor) -> torch.Tensor:
        return way.normed[0]

    def _gate_tokens(self, weight: torch.Tensor, way: _Pass, x: torch.Tensor) -> torch.Tensor:
        return x * F.linear(way.normed[0], weight).sigmoid()

    def _sum(self, product: _Product, way: _Pass, x: torch.Tensor) -> torch.Tensor:
        """The product, summed over the ranks, + its bias."""
        total = self._total(product, way, x)
        return total if product.bias is None else total + product.bias

    def _add_product_norm(self, product: _Product, norm: RowNorm, way: _Pass, x: torch.Tensor) -> torch.Tensor:
        """The residual += `_sum`; then its norm."""
        if self.parallel.world_size == 1 and self._adapted(product, way) is None:
            return self.ops.add_product_norm(way.residual, x, product.matrix, norm, product.bias)
        return self.ops.add_norm(way.residual, self._total(product, way, x), norm, product.bias)

    def _total(self, product: _Product, way: _Pass, x: torch.Tensor) -> torch.Tensor:
        """The product, summed over the ranks."""
        times = self.config.n_layers if product.is_timed and self.parallel.world_size > 1 else 0
        waiting = way.clock.waiting(times) if times else nullcontext()
        return self._sum_of_products(x, product.matrix, waiting, self._adapted(product, way))

    def _sum_of_products(
        self, x: torch.Tensor, matrix: TorchMatrix, waiting: AbstractContextManager[None], lora: Adapted | None
    ) -> torch.Tensor:
        """The sum over the ranks, made within `waiting`."""
        part = self.ops.add_adapters(matrix.multiply(x), x, lora)
        with waiting:
            return self._sum_over_ranks(part)

    def _experts(self, layer: int, route: Route, gates: GatedExperts, down: ExpertSum) -> Experts:
        router, bias = (self._held(layer, route.router, kind) for kind in ("weight", "bias"))
        held = []
        for each in (gates, down):
            matrix, biases = (self._held(layer, each.parts[0], kind) for kind in ("weight", "bias"))
            is_added_by_another = each is down and self.parallel.rank > 0
            held.append(expert_matrices(matrix, None if is_added_by_another else biases, self.config.n_experts))
        return Experts(route, router, bias, held[0], held[1], gates.activation)

    def _sum_experts(self, experts: Experts, way: _Pass, x: torch.Tensor) -> torch.Tensor:
        return self._sum_over_ranks(experts.apply(self.ops, x))

    def _adapted(self, product: _Product, way: _Pass) -> Adapted | None:
        if way.places is None or self.adapters is None:
            return None
        return Adapted(self.adapters.by_matrix[product.name], way.places)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [R, dim] -> [R, vocab_size] in the model's dtype, whole on every rank."""
        widths = [len(share.vocab) for share in self._shares]
        return self._divided(self.parallel.gather_columns(self._output.multiply(hidden_states), widths))

    def _divided(self, logits: torch.Tensor) -> torch.Tensor:
        """In place."""
        logits = logits if self.config.logits_divisor == 1.0 else logits.div_(self.config.logits_divisor)
        cap = self.config.logits_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embed(
        self, step: StepTensors, known: SlotTokens, block_size: int, clock: StepClock
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The embeddings [T, dim] and the slot mapping, int64 [T], of the step's tokens."""
        columns = [len(share.columns) for share in self._shares]
        part, slot_mapping = self.ops.embed(step, known, block_size, self._embeddings)
        with clock.waiting() if self.parallel.world_size > 1 else nullcontext():
            return self.parallel.gather_columns(part, columns), slot_mapping
