"""A process that replays decodes is killed: when its memory is free, and when the process after it gives a token.

The next process waits with its libraries imported and no CUDA context, as a standby does. It begins when the killed one is
gone, and knows how many blocks its cache had, as in the server. Its time is counted beyond a load that nothing disturbs.
"""

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.clock import Clock, clock_of
from benchmarks.gpu.engine import HandMadeSteps, model_of, open_engine
from benchmarks.gpu.recorder import Recorder, Unavailable, waited
from benchmarks.gpu.settings import Settings, add_settings, settings_of
from benchmarks.harness.common import REPOSITORY
from benchmarks.harness.make_checkpoint import SHAPES, random_weights, write_meta
from llama_core.backends.fused.device import import_kernels

_LIMIT_S = 60.0


def run(record: Recorder, settings: Settings) -> None:
    if record.has("kill_to_token_s"):
        return
    with random_checkpoint(settings) as folder:
        clock = clock_of(settings.device)
        clock.synchronize()
        idle = clock.free_bytes()
        processes = first, victim, heir = [_Process(settings, folder) for _ in range(3)]
        try:
            record.put("first_load_s", first.start()["load_s"])
            before = clock.free_bytes()
            first.process.kill()
            _wait_until_free(clock, first, idle, before)
            # Undisturbed, and from the page cache, as after a failure.
            undisturbed = victim.start()
            record.put("load_s", undisturbed["load_s"])
            record.put("start", undisturbed["split"])
            before = clock.free_bytes()
            begin = time.perf_counter()
            victim.process.kill()
            victim.process.wait()
            heir.go(undisturbed["blocks"])  # it waits for the memory itself, as new ranks do
            gone_s = time.perf_counter() - begin
            took = heir.read() | heir.read()
            record.put("kill_to_token_s", time.perf_counter() - begin)
            record.put("process_gone_s", gone_s)
            record.put("next_load_s", took["load_s"])
            record.put("next_start", took["split"])
            record.put("next_ready_s", took["ready_s"])
            record.put("beyond_load_s", record.figures["kill_to_token_s"] - undisturbed["load_s"])
            heir.process.kill()
            record.put("memory_free_after_s", _wait_until_free(clock, heir, idle, before))
        finally:
            for process in processes:
                process.end()


def _wait_until_free(clock: Clock, process: "_Process", idle: int, before: int) -> float | str:
    found = waited(lambda: _is_free(clock, process, idle, before), _LIMIT_S)
    return found if found is not None else f"not within {_LIMIT_S:g} s"


def _is_free(clock: Clock, process: "_Process", idle: int, before: int) -> bool:
    """The memory that the process held is free, but for a hundredth. On a CPU: the process is gone."""
    gone = process.process.poll() is not None
    return gone and (clock.device.type == "cpu" or clock.free_bytes() >= idle - 0.01 * (idle - before))


class _Process:
    """This module as a program, which begins when it is told to."""

    def __init__(self, settings: Settings, folder: str) -> None:
        command = [sys.executable, "-m", __name__, folder, *settings.arguments]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read()  # it has its libraries

    def go(self, former_blocks: int = 0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{former_blocks}\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError("the process ended before it said anything")

    def start(self) -> dict[str, Any]:
        """Until its first token; from there on it replays."""
        self.go()
        return self.read() | self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def random_checkpoint(settings: Settings) -> Iterator[str]:
    """The folder of the settings' shape and dtype, which is removed afterwards. Raises Unavailable where it does not fit."""
    model, dtype = model_of(settings), getattr(torch, settings.dtype)
    with tempfile.TemporaryDirectory(prefix="llama-gpu-bench-") as folder:
        need = 2 * model.n_layers * 12 * model.dim**2
        if shutil.disk_usage(folder).free < need:
            raise Unavailable(f"a checkpoint of {need / 1e9:.0f} GB does not fit into {folder}")
        write_meta(Path(folder), SHAPES[settings.shape], random_weights(model, dtype, seed=0), tokenizer=None)
        yield folder


def main() -> None:
    """One of the processes: loads a checkpoint when it is told how many cache blocks the process before it had (0: there was
    none), says when it has a token, and decodes until it is killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ckpt", type=Path)
    add_settings(parser)
    options = parser.parse_args()
    settings = settings_of(options)
    if settings.device == "cuda":
        import_kernels()  # as a standby process does
        # As `rank_process` does, which then collects what loading leaves.
        gc.collect()
        gc.freeze()
    _say(ready=True)
    told = sys.stdin.readline()
    assert told, "the parent has ended"
    begin = time.perf_counter()
    sizes = settings.sizes
    engine = open_engine(settings, sizes.context, max(sizes.rows), ckpt=options.ckpt, former_blocks=int(told))
    gc.collect()
    gc.freeze()
    _say(load_s=engine.load_s, blocks=engine.num_blocks, split=engine.split)
    steps = HandMadeSteps(engine, 1, 8)
    engine.runner.step(steps.decode())
    _say(token_s=time.perf_counter() - begin, ready_s=engine.ready_s)
    while True:
        engine.runner.step(steps.decode())


def _say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
