"""The memory that the engine takes after its largest steps, beside what it planned."""

from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.engine import HandMadeSteps, open_engine
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings


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
    length = min(sizes.prompt, runner.config.max_step_tokens - rows, sizes.context - 2)
    for _ in range(3):
        runner.step(steps.decode())
        runner.step(steps.with_prompt(length))
    clock.synchronize()
    taken = before - clock.free_bytes()
    record.put("planned_bytes", planned | {"total": sum(planned.values())})
    record.put("taken_bytes", taken)
    record.put("taken_of_plan", taken / sum(planned.values()))
