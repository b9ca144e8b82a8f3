"""Steps of decodes, and of decodes beside a prompt: the host's time to queue one, beside the device's to compute it."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.engine import Engine, HandMadeSteps, open_engine
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import Spread

MASKS_S = 0.5e-3


def run(record: Recorder, settings: Settings) -> None:
    sizes = settings.sizes
    if record.has("decodes", "decodes_and_a_prompt", "behind_a_step", "decodes_with_masks"):
        return
    rows = sizes.mixed_decodes
    engine = open_engine(settings, sizes.context, rows + 1, sizes.prompt + rows)
    context = engine.context_for(rows + 1, min(300, sizes.context // 2))
    length = min(sizes.prompt, sizes.context - 2)
    steps = HandMadeSteps(engine, rows, context, 0.7)
    record.measure("decodes", lambda: timed(engine, settings, steps, 0))
    record.measure("decodes_and_a_prompt", lambda: timed(engine, settings, steps, length))
    record.measure("behind_a_step", lambda: behind(engine, settings, steps, length))
    record.measure("decodes_with_masks", lambda: masked(engine, settings, steps))


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


class _AllowingMasks:
    """Masks of every row that allow all tokens, made in another thread in `MASKS_S`, as a grammar's are."""

    def __init__(self, rows: int, vocab_size: int, thread: ThreadPoolExecutor) -> None:
        self.bits = np.full((rows, -(-vocab_size // 32)), 0xFFFFFFFF, dtype=np.uint32)
        self.has_mask = [True] * rows
        self.is_ready = np.ones(rows, dtype=np.uint32)
        self._work: Future[None] = thread.submit(time.sleep, MASKS_S)

    @property
    def is_done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        self._work.result()


def masked(engine: Engine, settings: Settings, steps: HandMadeSteps) -> dict[str, object]:
    """Decodes whose rows all have a mask. host_us: until `start` returns, without the masks. step_ms: until the tokens are
    read. samples_us: the host's time between the masks and the queued samples."""
    clock, host, samples, whole = clock_of(settings.device), [], [], []
    vocab_size = engine.runner.config.vocab_size
    engine.runner.step(steps.decode())  # the first step admits the sequences
    with ThreadPoolExecutor(1) as thread, torch.inference_mode():
        for _ in range(settings.sizes.repeats + 3):
            rows = steps.decode().rows
            clock.synchronize()
            begin = time.perf_counter()
            masks = _AllowingMasks(len(rows), vocab_size, thread)
            pending = engine.runner.backend.start(rows, keep_logits=False, masks=masks)
            host.append((time.perf_counter() - begin) * 1e6)
            masks.wait()
            made = time.perf_counter()
            engine.runner.backend.queue_samples()
            samples.append((time.perf_counter() - made) * 1e6)
            pending.result()
            whole.append((time.perf_counter() - begin) * 1e3)
    return {
        "host_us": Spread.of(host[3:]),
        "samples_us": Spread.of(samples[3:]),
        "masks_ms": MASKS_S * 1e3,
        "step_ms": Spread.of(whole[3:]),
    }
