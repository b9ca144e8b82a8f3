"""Any ModelConfig as an uncached forward in float64 with whole weights: what the backends' logits are compared with.

Also random weights for a configuration, and a checkpoint of them in memory that `ModelRunner.load` reads like any other.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

from llama_core.backends.parallel import Parallel
from llama_core.backends.rotary import rotary_table
from llama_core.backends.runner import ModelRunner
from llama_core.config import EngineConfig
from llama_core.files.source import DENSE, GroupedSlice, Slice
from llama_core.model_config import ModelConfig
from llama_core.model_weights import EMBEDDING, OUTPUT, Box, weight_specs

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


def forward(config: ModelConfig, weights: Weights, tokens: Sequence[int], max_seq_len: int) -> torch.Tensor:
    """float64 [len(tokens), vocab_size]: the logits after each token."""
    w = {name: weight.double() for name, weight in weights.items()}
    table = rotary_table(config.rope, config.head_dim, max_seq_len, torch.device("cpu"))[: len(tokens)].double()
    x = w[EMBEDDING][torch.tensor(tokens)]
    for layer in range(config.n_layers):
        part = {name.split(".", 2)[2]: weight for name, weight in w.items() if name.startswith(f"layers.{layer}.")}
        x = x + _attention(config, layer, part, _norm(config, x, part["attention_norm.weight"]), table)
        x = x + _feed_forward(part, _norm(config, x, part["ffn_norm.weight"]))
    return _norm(config, x, w["norm.weight"]) @ w[OUTPUT].T


def _norm(config: ModelConfig, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).rsqrt() * weight


def _linear(part: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, part[f"{name}.weight"], part.get(f"{name}.bias"))


def _attention(config: ModelConfig, layer: int, part: Weights, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """x [T, dim] -> [T, dim]."""
    q, k, v = (
        _linear(part, f"attention.{name}", x).unflatten(-1, (-1, config.head_dim)) for name in ("wq", "wk", "wv")
    )
    if config.qk_norm:
        q, k = (_norm(config, y, part[f"attention.{n}_norm.weight"]) for y, n in ((q, "q"), (k, "k")))
    q, k = (_rotate(y, table) for y in (q, k))
    group = config.n_heads // config.n_kv_heads
    k, v = (y.repeat_interleave(group, dim=1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    window = config.window(layer) or len(x)
    weights = scores.masked_fill((distance < 0) | (distance >= window), float("-inf")).softmax(-1)
    return _linear(part, "attention.wo", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


def _rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.view_as_complex(table)[:, None]
    return torch.view_as_real(turned).flatten(-2)


def _feed_forward(part: Weights, x: torch.Tensor) -> torch.Tensor:
    gate, up = (_linear(part, f"feed_forward.{name}", x) for name in ("w1", "w3"))
    return _linear(part, "feed_forward.w2", F.silu(gate) * up)


class MemoryCheckpoint:
    """See `CheckpointSource` and `WeightReader`: weights that lie in memory."""

    files: Sequence[Path] = ()
    metadata_files: Sequence[Path] = ()
    stop_ids: frozenset[int] = frozenset()

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

    def grouped_slices(self, name: str, box: Box) -> Iterator[GroupedSlice]:
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
