"""Decodes at several batch sizes beside the read bandwidth, and prompts beside the product rate, as `generate` runs them."""

import itertools
import statistics
from functools import partial

import torch

from benchmarks.gpu.clock import Clock, clock_of, product_tflop_s, read_gb_s
from benchmarks.gpu.engine import Engine, model_of, open_engine
from benchmarks.gpu.recorder import Recorder, median
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import Spread
from benchmarks.harness.in_process import prefill_operations, run_on
from benchmarks.harness.workload import Request, uniform_batch


def run(record: Recorder, settings: Settings) -> None:
    sizes = settings.sizes
    limits(record, settings)  # in this process, and in its clocks
    wanted = [f"decode_{rows}" for rows in sizes.rows]
    if record.has(*wanted, "prompt", "read_gb_s_afterwards"):
        return
    clock_of(settings.device).free_bytes()  # what torch kept of the probes
    engine = open_engine(settings, sizes.context, max(sizes.rows))
    record.put("load_s", engine.load_s)
    record.put("cache_and_graphs_s", engine.ready_s)
    for rows, name in zip(sizes.rows, wanted, strict=True):
        record.measure(name, partial(decode, engine, settings, rows, median(record.figures["read_gb_s"])))
    record.measure("prompt", lambda: prompt(engine, settings, median(record.figures["prompt_product_tflop_s"])))
    num_bytes = min(sizes.probe_bytes, int(clock_of(settings.device).free_bytes() * 0.5))
    record.measure("read_gb_s_afterwards", lambda: read_gb_s(clock_of(settings.device), num_bytes, sizes.repeats))


def limits(record: Recorder, settings: Settings) -> None:
    """What the device reaches at best: reading, products of the model's shapes, and the time between two kernels of a graph."""
    clock, sizes, model = clock_of(settings.device), settings.sizes, model_of(settings)
    dtype, size = getattr(torch, settings.dtype), sizes.product_size
    num_bytes = min(sizes.probe_bytes, int(clock.free_bytes() * 0.5))
    record.measure("read_gb_s", lambda: read_gb_s(clock, num_bytes, sizes.repeats))
    record.measure("product_tflop_s", lambda: product_tflop_s(clock, size, size, size, dtype, sizes.repeats))
    shape = sizes.prompt, 2 * model.hidden_dim, model.dim
    record.measure("prompt_product_tflop_s", lambda: product_tflop_s(clock, *shape, dtype, sizes.repeats))
    if settings.device == "cuda":
        record.measure("us_between_kernels", lambda: us_between_kernels(clock))


def us_between_kernels(clock: Clock) -> float:
    """Of a graph of kernels that do next to nothing, each after the one before."""
    value, count = torch.zeros(1, device=clock.device), 200

    def kernels() -> None:
        for _ in range(count):
            value.add_(1)

    return clock.milliseconds(clock.recorded(kernels), 20).median * 1e3 / count


def decode(engine: Engine, settings: Settings, rows: int, read_rate: float) -> dict[str, object]:
    """rows sequences of one length. floor_ms: of reading the step's bytes at the measured bandwidth."""
    sizes = settings.sizes
    length = max(1, min(sizes.prompt // 4, sizes.context - sizes.output - 1))
    requests = uniform_batch(rows, length, sizes.output, settings.vocab_size)
    run_on(engine.runner, engine.num_blocks, [Request(one.prompt, 2) for one in requests])
    done = run_on(engine.runner, engine.num_blocks, requests, settings.temperature)
    steps = [step for step in done.decode_steps if step.num_rows == rows]
    # From the end of a step to the end of the next: what clients see, the time between steps included.
    times = [(after.end_s - before.end_s) * 1e3 for before, after in itertools.pairwise(steps)]
    floor = engine.step_bytes(rows, length + sizes.output / 2) / read_rate / 1e6
    middle = statistics.median(times)
    return {
        "context": length + sizes.output // 2,
        "step_ms": Spread.of(times),
        "tok_s": rows / middle * 1e3,
        "floor_ms": floor,
        "share_of_bandwidth": floor / middle,
    }


def prompt(engine: Engine, settings: Settings, product_rate: float) -> dict[str, object]:
    """One prompt alone, in one step."""
    sizes = settings.sizes
    length = min(sizes.prompt, engine.runner.config.max_step_tokens, sizes.context - 2)
    times = []
    for seed in range(max(2, sizes.repeats // 4) + 1):
        (request,) = uniform_batch(1, length, 1, settings.vocab_size, seed + 100)
        times.append(run_on(engine.runner, engine.num_blocks, [request]).steps[-1].ms)
    middle = statistics.median(times[1:])
    rate = prefill_operations(engine.model, length) / middle / 1e9
    return {
        "tokens": length,
        "ms": Spread.of(times[1:]),
        "first_ms": times[0],
        "tok_s": length / middle * 1e3,
        "tflop_s": rate,
        "share_of_products": rate / product_rate,
    }
