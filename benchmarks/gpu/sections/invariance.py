"""Seeded texts: the same request twice, and alone against in a batch of eight. Counted, not judged.

On a GPU also with `batch_invariant`, and what that costs: the time of the batch beside the time without it.
"""

import time

from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.engine import Engine, open_engine
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.harness.workload import random_prompt
from llama_core.batch_loop import run_batch
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams

REQUESTS = 8


def run(record: Recorder, settings: Settings) -> None:
    _measure(record, settings, "", batch_invariant=False)
    if settings.device == "cuda":  # needs the Triton kernels
        _measure(record, settings, "batch_invariant_", batch_invariant=True)
        if not record.has("batch_invariant_cost"):
            seconds = [record.figures[f"{prefix}batch_s"] for prefix in ("batch_invariant_", "")]
            record.put("batch_invariant_cost", seconds[0] / seconds[1])


def texts(engine: Engine, settings: Settings, seeds: "range | list[int]") -> list[list[int]]:
    """Half of the requests are greedy."""
    sizes, sequences = settings.sizes, []
    for seed in seeds:
        prompt = random_prompt(max(2, sizes.shortest // 2 + seed), settings.vocab_size, seed)
        params = SamplingParams(
            temperature=0.8 * (seed % 2), top_p=0.9, seed=seed, max_tokens=2 * sizes.output, ignore_eos=True
        )
        sequences.append(Sequence(prompt, params, len(prompt) + params.max_tokens))
    run_batch(engine.runner, engine.num_blocks, frozenset(), sequences)
    return [sequence.output for sequence in sequences]


def _measure(record: Recorder, settings: Settings, prefix: str, *, batch_invariant: bool) -> None:
    """The figures twice, batch_s and alone_and_in_a_batch, their names behind `prefix`."""
    if record.has(f"{prefix}twice", f"{prefix}batch_s", f"{prefix}alone_and_in_a_batch"):
        return
    engine = open_engine(settings, settings.sizes.context, REQUESTS, batch_invariant=batch_invariant)
    together = texts(engine, settings, range(REQUESTS))
    begin = time.perf_counter()
    again = texts(engine, settings, range(REQUESTS))
    record.measure(f"{prefix}batch_s", lambda: time.perf_counter() - begin)
    record.measure(f"{prefix}twice", lambda: compared(together, again))
    alone = [text for seed in range(REQUESTS) for text in texts(engine, settings, [seed])]
    record.measure(f"{prefix}alone_and_in_a_batch", lambda: compared(together, alone))
    del engine
    clock_of(settings.device).free_bytes()  # the next engine's cache takes what is free


def compared(texts: list[list[int]], others: list[list[int]]) -> dict[str, int]:
    """same: texts that are equal. first_difference: the earliest token that differs; -1 if none does."""
    different = [
        next(i for i, (one, other) in enumerate(zip(text, again, strict=True)) if one != other)
        for text, again in zip(texts, others, strict=True)
        if text != again
    ]
    return {"texts": len(texts), "same": len(texts) - len(different), "first_difference": min(different, default=-1)}
