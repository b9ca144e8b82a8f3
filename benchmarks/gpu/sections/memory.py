"""The memory that the engine takes after its largest steps, with a graph and without, beside what it planned."""

import torch

from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.engine import HandMadeSteps, open_engine
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings
from llama_core.backends.fused.step_plan import LARGEST_PADDING

TOLERANCE = 0.03


def run(record: Recorder, settings: Settings) -> None:
    """kv_cache_bytes is set, so that working memory is a part of the whole that shows."""
    sizes, clock = settings.sizes, clock_of(settings.device)
    clock.synchronize()
    before = clock.free_bytes()
    rows = max(sizes.rows)
    engine = open_engine(settings, sizes.context, rows + 1, kv_cache_bytes=2**33 if settings.device == "cuda" else None)
    runner = engine.runner
    planned = {
        "weights": runner.backend.weight_bytes,
        "cache": engine.num_blocks * runner.backend.cache_block_bytes,
        "working": runner.backend.working_bytes,
    }
    context = engine.context_for(rows, min(sizes.prompt, sizes.context) // 2)
    steps = HandMadeSteps(engine, rows, context, temperature=0.9)
    most = runner.config.max_step_tokens
    lengths = [min(sizes.prompt, size - rows, sizes.context - 2) for size in (most, int(most / LARGEST_PADDING))]
    for _ in range(3):
        runner.step(steps.decode())
        for length in lengths:
            runner.step(steps.with_prompt(length))
    clock.synchronize()
    taken = before - clock.free_bytes(releases=False)
    record.put("planned_bytes", planned | {"total": sum(planned.values())})
    record.put("taken_bytes", taken)
    record.put("taken_of_plan", taken / sum(planned.values()))
    if settings.device == "cuda":
        record.put("within_3_percent", verdict(taken, sum(planned.values())))
        in_torch = torch.cuda.memory_reserved()
        # The second: kernels, libraries' buffers, and memory that torch does not manage.
        record.put("taken_in_torch_bytes", in_torch)
        record.put("taken_beside_torch_bytes", taken - in_torch)


def verdict(taken: int, planned: int) -> str:
    return "yes" if abs(taken - planned) <= TOLERANCE * planned else "no"
