"""Steps of decodes, and of decodes beside a prompt: the host's time to queue one, beside the device's to compute it."""

import time

from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.engine import Engine, HandMadeSteps, open_engine
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import Spread


def run(record: Recorder, settings: Settings) -> None:
    sizes = settings.sizes
    if record.has("decodes", "decodes_and_a_prompt", "behind_a_step"):
        return
    rows = sizes.mixed_decodes
    engine = open_engine(settings, sizes.context, rows + 1, sizes.prompt + rows)
    context = engine.context_for(rows + 1, min(300, sizes.context // 2))
    length = min(sizes.prompt, sizes.context - 2)
    steps = HandMadeSteps(engine, rows, context, 0.7)
    record.measure("decodes", lambda: timed(engine, settings, steps, 0))
    record.measure("decodes_and_a_prompt", lambda: timed(engine, settings, steps, length))
    record.measure("behind_a_step", lambda: behind(engine, settings, steps, length))


def timed(engine: Engine, settings: Settings, steps: HandMadeSteps, length: int) -> dict[str, object]:
    """host_us: until `start` returns. step_ms: until the tokens are read. One step at a time."""
    clock, host, whole = clock_of(settings.device), [], []
    for _ in range(settings.sizes.repeats + 3):
        step = steps.with_prompt(length) if length else steps.decode()
        clock.synchronize()
        begin = time.perf_counter()
        pending = engine.runner.start(step)
        queued = time.perf_counter()
        pending.result()
        host.append((queued - begin) * 1e6)
        whole.append((time.perf_counter() - begin) * 1e3)
    found = Spread.of(host[3:]), Spread.of(whole[3:])
    return {"host_us": found[0], "step_ms": found[1], "host_share": found[0].median / 1e3 / found[1].median}


def behind(engine: Engine, settings: Settings, steps: HandMadeSteps, length: int) -> dict[str, object]:
    """The host's time to queue decodes behind a step with a prompt: as long as alone, if nothing waits."""
    clock, host = clock_of(settings.device), []
    for _ in range(settings.sizes.repeats + 3):
        clock.synchronize()
        first = engine.runner.start(steps.with_prompt(length))
        begin = time.perf_counter()
        second = engine.runner.start(steps.decode())
        host.append((time.perf_counter() - begin) * 1e6)
        first.result(), second.result()
    return {"host_us": Spread.of(host[3:])}
