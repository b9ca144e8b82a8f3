"""The kernels of a decode step by torch's profiler: how often each runs, and how long."""

from functools import partial
from typing import Any

import torch
from torch._C._autograd import DeviceType

from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.engine import Engine, HandMadeSteps, open_engine
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings

_STEPS = 5
_SHOWN = 14


def run(record: Recorder, settings: Settings) -> None:
    sizes = settings.sizes
    cases = [(rows, kind) for rows in sizes.buckets for kind in ("greedy", "sampled")]
    if record.has(*(f"{kind}_{rows}" for rows, kind in cases)):
        return
    context = min(sizes.prompt // 4, sizes.context // 2)
    engine = open_engine(settings, sizes.context, max(sizes.buckets))
    for rows, kind in cases:
        seen = engine.context_for(rows, context)
        steps = HandMadeSteps(engine, rows, seen, 0.9 if kind == "sampled" else 0.0)
        case = partial(_case, engine, settings, steps, seen)
        record.measure(f"{kind}_{rows}", case)


def _case(engine: Engine, settings: Settings, steps: HandMadeSteps, context: int) -> dict[str, Any]:
    return {"context": context, **profile(engine, settings, steps)}


def profile(engine: Engine, settings: Settings, steps: HandMadeSteps) -> dict[str, Any]:
    """us of a step by kernel, the longest first, and of all kernels together."""
    clock = clock_of(settings.device)
    kind = "CUDA" if settings.device == "cuda" else "CPU"
    for _ in range(2):
        engine.runner.step(steps.decode())
    wall = clock.milliseconds(lambda: engine.runner.step(steps.decode()), _STEPS)
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)]) as profiler:
        for _ in range(_STEPS):
            engine.runner.step(steps.decode())
        clock.synchronize()
    rows = []
    for event in profiler.key_averages():
        if event.device_type != getattr(DeviceType, kind):
            continue
        us = event.self_device_time_total if settings.device == "cuda" else event.self_cpu_time_total
        if us > 0:
            rows.append((us / _STEPS, event.count / _STEPS, event.key.split("(")[0][:60]))
    rows.sort(reverse=True)
    return {
        "step_ms": wall,
        "kernels_us": sum(us for us, _, _ in rows),
        "launches": sum(count for _, count, _ in rows),
        "longest": {name: f"{us:.1f} us, {count:g} x" for us, count, name in rows[:_SHOWN]},
    }
