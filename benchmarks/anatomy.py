"""Where the time of a step goes: milliseconds of each part of a step, and the least that each part could take.

A runner that can say it itself has `profile()`: {part: milliseconds a step}, of the steps since it was last asked. For one
that cannot, forward hooks on the model's modules measure it; what no module does (layout, sampling) is what is left of
the step.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.in_process import StepFunction, around_steps
from llama_core.batch import StepInput, StepOutput
from llama_core.config import ModelConfig

EMBEDDING = "embedding"
NORMS = "norms"
QKV = "queries, keys, values"
ATTENTION = "attention over the cache"
OUT = "attention's output projection"
FEED_FORWARD = "feed-forward"
VOCABULARY = "vocabulary"
REST = "layout, sampling, the rest of the step"
BETWEEN = "between the steps"

# By the last part of a module's name; what is inside one of these is not measured again, but for attention.
_PART_OF_MODULE = {
    "tok_embeddings": EMBEDDING,
    "attention_norm": NORMS,
    "ffn_norm": NORMS,
    "norm": NORMS,
    "wq": QKV,
    "wk": QKV,
    "wv": QKV,
    "attention": ATTENTION,
    "wo": OUT,
    "feed_forward": FEED_FORWARD,
    "output": VOCABULARY,
}
_INSIDE_ATTENTION = (QKV, OUT)


@contextmanager
def dissected(runner: Any, counts: Callable[[StepInput], bool]) -> Iterator[list[dict[str, float]]]:
    """Milliseconds of each part of every step that `runner` takes meanwhile and that `counts`."""
    steps: list[dict[str, float]] = []
    own: Callable[[], Mapping[str, float]] | None = getattr(runner, "profile", None)
    with contextlib.ExitStack() as stack:
        taken = {} if own else stack.enter_context(_timed_modules(runner.model, runner.parallel.device))

        def dissect(step: StepFunction, batch: StepInput) -> StepOutput:
            taken.clear()
            begin = time.perf_counter()
            output = step(batch)
            whole = 1e3 * (time.perf_counter() - begin)
            parts = dict(own()) if own else _of_modules(taken)
            if counts(batch):
                steps.append(parts | {REST: max(0.0, whole - sum(parts.values()))})
            return output

        stack.enter_context(around_steps(runner, dissect))
        yield steps


def _of_modules(taken: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds by part from seconds by part, where attention's still have its projections' in them."""
    parts = {part: 1e3 * taken.get(part, 0.0) for part in dict.fromkeys(_PART_OF_MODULE.values())}
    parts[ATTENTION] -= sum(parts[part] for part in _INSIDE_ATTENTION)
    return parts


def least_bytes(
    config: ModelConfig, weight_bytes: float, cache_bytes: float, rows: int, context: float
) -> dict[str, int]:
    """Bytes that each part must read in a step of `rows` sequences of `context` tokens.

    weight_bytes, cache_bytes: of one weight and of one number in the cache.
    """
    kv_dim = config.n_kv_heads * config.head_dim
    weights = {
        QKV: config.n_layers * config.dim * (config.dim + 2 * kv_dim),
        OUT: config.n_layers * config.dim * config.dim,
        FEED_FORWARD: config.n_layers * 3 * config.dim * config.hidden_dim,
        VOCABULARY: config.dim * config.vocab_size,
    }
    cached = int(2 * config.n_layers * kv_dim * cache_bytes * rows * context)
    return {part: int(count * weight_bytes) for part, count in weights.items()} | {ATTENTION: cached}


@contextmanager
def _timed_modules(model: nn.Module, device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds spent in the model's modules meanwhile, by part."""
    taken: dict[str, float] = defaultdict(float)
    began: dict[nn.Module, float] = {}

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # work is only queued when a module returns
        return time.perf_counter()

    def begin(module: nn.Module, inputs: Any) -> None:
        began[module] = now()

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        taken[part_of[module]] += now() - began[module]

    part_of = {}
    for name, module in model.named_modules():
        part = _PART_OF_MODULE.get(name.rpartition(".")[2])
        if part is not None:
            part_of[module] = part
    hooks = [module.register_forward_pre_hook(begin) for module in part_of]
    hooks += [module.register_forward_hook(end) for module in part_of]
    try:
        yield taken
    finally:
        for hook in hooks:
            hook.remove()
