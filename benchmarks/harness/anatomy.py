"""Where the time of a step goes: milliseconds of each part of a step, and the least that each part could take.

A backend that counts its own seconds (`seconds_by_op`) is read before and after each step. For other backends, forward hooks
on the model's modules measure the parts. The rest of the step (attention metadata, Python) is the part between the steps.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.harness.in_process import StartFunction, around_steps
from llama_core.execution.runner import ModelRunner
from llama_core.model_config import ModelConfig
from llama_core.scheduling.step import Pending, StepInput, StepOutput

EMBEDDING = "embedding"
NORMS = "norms"
QKV = "queries, keys, values"
ATTENTION = "attention over the cache"
OUT = "attention's output projection"
FEED_FORWARD = "feed-forward"
VOCABULARY = "vocabulary"
REST = "layout, sampling, the rest of the step"
BETWEEN = "between the steps"

# By the last part of a module's name. Modules inside one of these are not measured again, except in attention.
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
# The native backend's names of the same parts.
_PART_OF_OP = {"project q, k, v": QKV, "attend": ATTENTION, "project out": OUT, "logits": VOCABULARY}
_INSIDE_ATTENTION = (QKV, OUT)


@contextmanager
def dissected(runner: ModelRunner, counts: Callable[[StepInput], bool]) -> Iterator[list[dict[str, float]]]:
    """Milliseconds of each part of every step that `runner` runs inside the context and for which `counts` is true."""
    steps: list[dict[str, float]] = []
    with _clock(runner) as seconds:

        def dissect(start: StartFunction, batch: StepInput) -> Pending[StepOutput]:
            before, begin = seconds(), time.perf_counter()
            output = start(batch).result()
            whole, after = 1e3 * (time.perf_counter() - begin), seconds()
            parts = {part: 1e3 * (after[part] - before.get(part, 0.0)) for part in after}
            if counts(batch):
                steps.append(parts | {REST: max(0.0, whole - sum(parts.values()))})
            return Pending.done(output)

        with around_steps(runner, dissect):
            yield steps


@contextmanager
def _clock(runner: ModelRunner) -> Iterator[Callable[[], Mapping[str, float]]]:
    """A function that returns the seconds spent in each part so far."""
    counted: Callable[[], Mapping[str, float]] | None = getattr(runner.backend, "seconds_by_op", None)
    if counted is not None:
        yield counted
        return
    model = getattr(runner.backend, "model", None)
    assert isinstance(model, nn.Module), "a backend counts its own seconds, or has a model of modules"
    with _timed_modules(model, runner.parallel.device) as taken:
        yield lambda: _of_modules(taken)


def _of_modules(taken: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part. The hooks' time of attention includes its projections, which are subtracted here."""
    parts = {part: taken.get(part, 0.0) for part in dict.fromkeys(_PART_OF_MODULE.values())}
    parts[ATTENTION] -= sum(parts[part] for part in _INSIDE_ATTENTION)
    return parts


def least_bytes(
    config: ModelConfig, weight_bytes: float, cache_bytes: float, rows: int, context: float
) -> dict[str, int]:
    """Bytes that each part must read in a step of `rows` sequences of `context` tokens, under each of the part's names.

    weight_bytes, cache_bytes: bytes of one weight and of one number in the cache.
    """
    kv_dim = config.n_kv_heads * config.head_dim
    gate_and_up = config.n_layers * 2 * config.dim * config.hidden_dim
    counts = {
        QKV: config.n_layers * config.dim * (config.dim + 2 * kv_dim),
        OUT: config.n_layers * config.dim * config.dim,
        FEED_FORWARD: gate_and_up * 3 // 2,
        VOCABULARY: config.dim * config.vocab_size,
    }
    read = {part: int(count * weight_bytes) for part, count in counts.items()}
    read[ATTENTION] = int(2 * config.n_layers * kv_dim * cache_bytes * rows * context)
    native = {name: read[part] for name, part in _PART_OF_OP.items()}
    return read | native | {"gate and up": read[FEED_FORWARD] * 2 // 3, "project down": read[FEED_FORWARD] // 3}


def weights_of_a_step(config: ModelConfig) -> int:
    """Number of weights that a step reads, whatever its number of rows."""
    read = least_bytes(config, 1, 0, 0, 0)
    return sum(read[part] for part in (QKV, OUT, FEED_FORWARD, VOCABULARY))


@contextmanager
def _timed_modules(model: nn.Module, device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds spent in the model's modules inside the context, by part."""
    taken: dict[str, float] = defaultdict(float)
    began: dict[nn.Module, float] = {}

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a module returns when its work is queued, not when it is done
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
