"""Loads a checkpoint when it is told to, says when it has a token, and decodes until it is killed: for `recovery`.

It is told the number of cache blocks of the process that it replaces, 0 for none.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path

from benchmarks.gpu.engine import HandMadeSteps, open_engine
from benchmarks.gpu.settings import add_settings, settings_of
from llama_core.execution.fused.device import import_kernels


def main() -> None:
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
