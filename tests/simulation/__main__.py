"""Runs histories of a simulated fleet until one finds a fault, which it prints in the shortest form.

    python -m tests.simulation --seeds 2000 --start 1

A seed replays exactly.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

from tests.simulation.branches import Branches
from tests.simulation.history import Event, Setting, drawn
from tests.simulation.running import finding


def shortest(setting: Setting, events: Sequence[Event]) -> list[Event]:
    """With events removed, in halves, quarters and so on, while it still fails."""
    kept, size = list(events), len(events) // 2
    while size:
        begin = 0
        while begin < len(kept):
            fewer = kept[:begin] + kept[begin + size :]
            if finding(setting, fewer)[0]:
                kept = fewer
            else:
                begin += size
        size //= 2
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--start", type=int, default=1)
    parser.add_argument("--form", choices=("fleet", "build_app"), default="", help="default: the seed decides")
    parser.add_argument("--keep-going", action="store_true", help="after a finding, without its shortest form")
    parser.add_argument("--plain", action="store_true", help="end at a finding, without its shortest form")
    parser.add_argument("--branches", action="store_true", help="list those that no history takes; twice as slow")
    parser.add_argument("--verbose", action="store_true", help="show the log")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.CRITICAL, format="%(message)s")
    began_s, num_findings, num_events = time.perf_counter(), 0, 0
    branches = Branches()
    for seed in range(options.start, options.start + options.seeds):
        setting, events = drawn(seed, options.form)
        num_events += len(events)
        with branches if options.branches else nullcontext():
            found, _ = finding(setting, events)
        if not found:
            continue
        num_findings += 1
        print(f"seed {seed}: {found[:1000]}", flush=True)
        if options.plain:
            break
        if not options.keep_going:
            kept = shortest(setting, events)
            print(setting, *kept, finding(setting, kept)[0][:1000], sep="\n")
            break
    if options.branches:
        print(*branches.untaken(), sep="\n")
    seconds = time.perf_counter() - began_s
    print(f"{seed + 1 - options.start} seeds, {num_events} events, {num_findings} findings, {seconds:.1f} s")
    sys.exit(num_findings > 0)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    main()
