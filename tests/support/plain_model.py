"""Any ModelConfig as an uncached forward in float64 with whole weights: what the backends' logits are compared with.

Also random weights for a configuration, and a checkpoint of them in memory that `ModelRunner.load` reads like any other.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from llama_core.backends.native.backend import NativeBackend
from llama_core.backends.parallel import Parallel
from llama_core.backends.rotary import rotary_table
from llama_core.backends.runner import ModelRunner
from llama_core.config import EngineConfig
from llama_core.files.source import DENSE, GroupedSlice, Slice
from llama_core.model.config import ModelConfig
from llama_core.model.family import Given
from llama_core.model.llama import HEAD_NORMS, llama_layer
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
    Rotate,
    Route,
    TokenGate,
    Weight,
)
from llama_core.model.rope import RopeConfig
from llama_core.model.weights import EMBEDDING, OUTPUT, Box, weight_specs

Weights = dict[str, torch.Tensor]


def random_weights(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Weights:
    """Values large enough that the next token depends on all previous ones, and small enough for bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, spec in weight_specs(config).items():
        values = torch.randn(spec.shape, generator=generator)
        if name.endswith(".bias"):
            values = 0.3 * values
        elif len(spec.shape) == 1:
            values = 1 + 0.2 * values
        elif name != EMBEDDING:
            values = values * spec.shape[1] ** -0.5
        weights[name] = values.to(dtype)
    if config.tied_embeddings:
        weights[OUTPUT] = weights[EMBEDDING]
    return weights


_ROPE = RopeConfig()


def decoder(
    dim: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    hidden_dim: int,
    vocab_size: int,
    *,
    rope: RopeConfig = _ROPE,
    windows: Sequence[int] = (),
    attention_bias: bool = False,
    attention_out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    **others: Any,
) -> ModelConfig:
    """Llama's layers with such switches. windows: one a layer, () for none. others: of ModelConfig."""
    given = Given(rope, tuple(windows) or (0,) * n_layers, attention_bias, attention_out_bias, mlp_bias)
    layers = tuple(llama_layer(given, i, norms=HEAD_NORMS if qk_norm else None) for i in range(n_layers))
    return ModelConfig(dim, n_heads, n_kv_heads, head_dim, hidden_dim, vocab_size, layers, **others)


def forward(config: ModelConfig, weights: Weights, tokens: Sequence[int], max_seq_len: int) -> torch.Tensor:
    """float64 [len(tokens), vocab_size]: the logits after each token."""
    w = {name: weight.double() for name, weight in weights.items()}
    residual = w[EMBEDDING][torch.tensor(tokens)] * config.embedding_multiplier
    if config.norms_embedding:
        residual = _norm(config, residual, torch.ones(config.dim))
    for i, layer in enumerate(config.layers):
        part = {name.split(".", 2)[2]: weight for name, weight in w.items() if name.startswith(f"layers.{i}.")}
        heads: list[torch.Tensor] = []
        x = normed = residual
        for operation in layer:
            match operation:
                case Norm(weight, eps):
                    is_of_residual = x is residual
                    x = _norm(config, x, weight.offset + part[f"{weight.name}.weight"], eps)
                    normed = x if is_of_residual else normed
                case Linear(_, parts):
                    heads = [_linear(part, each.name, x) for each in parts]
                    x = heads[0]
                case Rotate(_, norms, has_plain_norms):
                    for at, norm in enumerate(norms or ()):
                        if operation.norms_all_heads:
                            heads[at] = _norm(config, heads[at], part[f"{norm.name}.weight"])
                    heads = [each.unflatten(-1, (-1, config.head_dim)) for each in heads]
                    for at, norm in enumerate(norms or ()):
                        if not operation.norms_all_heads:
                            heads[at] = _norm(config, heads[at], norm.offset + part[f"{norm.name}.weight"])
                    if has_plain_norms:
                        heads[:2] = (_norm(config, each, torch.ones(config.head_dim)) for each in heads[:2])
                    for at, angles in enumerate((operation.queries, operation.keys)):
                        table = rotary_table(angles, config.head_dim, max_seq_len, torch.device("cpu"))
                        heads[at] = _rotate(heads[at], table[: len(tokens)].double())
                case Attend(window, scale, is_gated, sinks):
                    of_heads = None if sinks is None else part[f"{sinks.name}.weight"]
                    q, k, v, *gated = heads
                    x = _attend(config, window or len(x), scale or config.head_dim**-0.5, q, k, v, of_heads)
                    x = x * gated[0].flatten(1).sigmoid() if is_gated else x
                case GatedLinear(_, parts, activation):
                    gate, up = (_linear(part, each.name, x) for each in parts)
                    x = _gate(gate, up, activation)
                case Again():
                    x = normed
                case TokenGate(weight):
                    x = x * _linear(part, weight.name, normed).sigmoid()
                case Route():
                    route = operation
                case GatedExperts():
                    gates = operation
                case ExpertSum(_, (down,)):
                    x = _sum_experts(part, route, gates, down, x)
                case Add(multiplier):
                    x = residual = residual + multiplier * x
    logits = _norm(config, residual, config.norm_offset + w["norm.weight"]) @ w[OUTPUT].T / config.logits_divisor
    cap = config.logits_cap
    return logits if cap is None else cap * (logits / cap).tanh()


def _norm(config: ModelConfig, x: torch.Tensor, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + (eps or config.norm_eps)).rsqrt() * weight


def _linear(part: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, part[f"{name}.weight"], part.get(f"{name}.bias"))


def _gate(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "clamped_swiglu":
        gate = gate.clamp(max=7)
        return gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def _sum_experts(part: Weights, route: Route, gates: GatedExperts, down: Weight, x: torch.Tensor) -> torch.Tensor:
    logits = _linear(part, route.router.name, x)
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, : route.top_k]
    weights = logits.gather(-1, chosen).softmax(-1) if route.norm_topk else logits.softmax(-1).gather(-1, chosen)
    scores = torch.ones_like(weights)
    if route.scales_inputs:
        scores, weights = logits.gather(-1, chosen).sigmoid(), scores
    total = torch.zeros_like(x)
    for token, (experts, shares, factors) in enumerate(zip(chosen.tolist(), weights, scores, strict=True)):
        for expert, share, factor in zip(experts, shares, factors, strict=True):
            gate, up = (_linear(part, each.name.format(expert), factor * x[token]) for each in gates.parts)
            total[token] += share * _linear(part, down.name.format(expert), _gate(gate, up, gates.activation))
    return total


def _attend(
    config: ModelConfig,
    window: int,
    scale: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[T, heads, head_dim] each -> [T, heads * head_dim]."""
    group = config.n_heads // config.n_kv_heads
    k, v = (y.repeat_interleave(group, dim=1) for y in (k, v))
    at = torch.arange(len(q))
    distance, chunk = at[:, None] - at, at // abs(window)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    is_outside = distance >= window if window > 0 else chunk[:, None] != chunk
    scores = scores.masked_fill((distance < 0) | is_outside, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def _rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.view_as_complex(table)[:, None]
    return torch.view_as_real(turned).flatten(-2)


class MemoryCheckpoint:
    """See `CheckpointSource` and `WeightReader`: weights that lie in memory."""

    files: Sequence[Path] = ()
    metadata_files: Sequence[Path] = ()
    stop_ids: frozenset[int] = frozenset()
    ignored: Sequence[str] = ()
    of_images: Sequence[str] = ()

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights

    @property
    def dtype(self) -> torch.dtype:
        return self._weights[OUTPUT].dtype

    def owns(self, name: str) -> bool:
        return False

    def num_shards(self) -> int:
        return 1

    def model_config(self, vocab_size: int) -> ModelConfig:
        return self._config.check("memory")

    def open_weights(self, config: ModelConfig) -> "MemoryCheckpoint":
        return self

    def slices(self, name: str, box: Box) -> Iterator[Slice]:
        region = tuple(slice(begin, begin + size) for begin, size in zip(box.start, box.shape, strict=True))
        yield Slice(Path("memory"), self._weights[name][region], (0,) * len(region))

    def stored_format(self, name: str) -> str:
        return DENSE

    def grouped_slices(self, name: str, box: Box, coding: str) -> Iterator[GroupedSlice]:
        raise LookupError(name)

    def verify_checksums(self, index: int, count: int) -> None:
        pass


def load_runner(
    parallel: Parallel, model: ModelConfig, *, seed: int = 0, stored: torch.dtype = torch.float32, **settings: object
) -> ModelRunner:
    """A runner of `random_weights(model, seed, stored)`, ready for steps. `settings`: of EngineConfig."""
    fields = {"max_seq_len": 160, "max_batch_size": 8, "max_step_tokens": 160, "device": "cpu", "dtype": "float32"}
    config = EngineConfig("memory", model.vocab_size, **fields | settings)  # type: ignore[arg-type]
    checkpoint = MemoryCheckpoint(model, random_weights(model, seed, stored))
    with patch("llama_core.backends.rank_loading.open_checkpoint", lambda path: checkpoint):
        runner = ModelRunner.load(config, parallel)
    runner.allocate_cache(runner.max_num_blocks())
    runner.warm_up()
    return runner


def poke_embedding(backend: NativeBackend, token: int, value: float) -> None:
    """Overwrite a token's embedding on this rank."""
    row = torch.full((2**16,), value)  # more than any rank's columns
    backend._native.llama_poke_embedding(backend._engine, token, row.data_ptr())
