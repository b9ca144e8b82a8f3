"""A batch of requests of mixed lengths, all at once."""

from benchmarks.gpu.engine import open_engine
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.harness.in_process import run_on
from benchmarks.harness.workload import Request, long_batch


def batch(settings: Settings) -> list[Request]:
    sizes = settings.sizes
    return long_batch(sizes.requests, sizes.shortest, sizes.longest, settings.vocab_size)


def warm_up(requests: list[Request]) -> list[Request]:
    return [Request(request.prompt, min(4, request.num_output)) for request in requests[:8]]


def longest_of(requests: list[Request]) -> int:
    return max(len(request.prompt) + request.num_output for request in requests)


def run(record: Recorder, settings: Settings) -> None:
    if record.has("output_tok_s"):
        return
    requests = batch(settings)
    engine = open_engine(settings, longest_of(requests), len(requests), settings.sizes.prompt)
    run_on(engine.runner, engine.num_blocks, warm_up(requests))
    done = run_on(engine.runner, engine.num_blocks, requests)
    record.put("steps", len(done.steps))
    record.put("seconds", done.seconds)
    record.put("output_tok_s", done.num_output / done.seconds)
