"""The batch of `offline` on transformers' continuous batching, with random weights of the same shape."""

import time
from typing import Final

import torch

from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.engine import model_of
from benchmarks.gpu.recorder import Recorder, Unavailable
from benchmarks.gpu.sections.offline import batch, longest_of, warm_up
from benchmarks.gpu.settings import Settings
from benchmarks.peers.hf_continuous import ContinuousBatching

# Longer batches are cancelled, and an upper bound of their tokens per second is stored.
_LIMIT_S: Final = 30.0


def run(record: Recorder, settings: Settings) -> None:
    if record.has("seconds"):
        return
    requests, device, begin = batch(settings), clock_of(settings.device).device, time.perf_counter()
    try:
        import transformers  # noqa: F401, timed by itself: it reads thousands of files

        record.put("import_s", time.perf_counter() - begin)
        begin = time.perf_counter()
        peer = ContinuousBatching(model_of(settings), longest_of(requests), getattr(torch, settings.dtype), device)
    except ImportError as error:
        raise Unavailable(f"transformers is not installed ({error})") from None
    record.put("load_s", time.perf_counter() - begin)
    begin = time.perf_counter()
    with peer:
        record.put("start_s", time.perf_counter() - begin)
        record.put("warm_up_s", peer.seconds(warm_up(requests)))
        seconds = peer.seconds(requests, _LIMIT_S)
        record.put("finished", peer.num_finished)
        if seconds is None:
            record.put("seconds", f"more than {_LIMIT_S:g}")
            record.put("output_tok_s_at_most", sum(request.num_output for request in requests) / _LIMIT_S)
        else:
            record.put("seconds", seconds)
            record.put("output_tok_s", sum(request.num_output for request in requests) / seconds)
