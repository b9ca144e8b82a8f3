"""Processes, threads and resident memory of a server, idle and under load, beside the server's own memory plan.

    python -m benchmarks memory                                            the demo model, as `make serve` starts it
    python -m benchmarks memory ckpt_dir=DIRECTORY model_parallel_size=1   another one
    python -m benchmarks memory --how serve-run                            by plain `serve run`
    python -m benchmarks memory --url URL --model NAME -- COMMAND ...      any other OpenAI-compatible server

Resident memory is given twice: rss counts a shared page in each process, pss once. A rank logs its plan (weights, cache,
working memory) when it allocates its cache. The plan is compared with the rank's peak less the memory of an empty rank, a
process that has imported a rank's modules.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import processes
from benchmarks.harness.common import REPOSITORY, emit, print_table
from benchmarks.harness.load import HttpSession
from benchmarks.harness.options import question_parser
from benchmarks.harness.processes import Process
from benchmarks.harness.programs import end_programs_on_sigterm
from benchmarks.harness.workload import uniform_batch
from benchmarks.questions.online import one_load
from benchmarks.questions.startup import LINES_LATE_S, add_start_options, first_answer, parse_start, started

SETTLED_AFTER_S = 6.0  # Ray ends idle workers meanwhile
SAMPLE_EVERY_S = 0.25
SAFE_VOCABULARY = 256  # ids below this exist in every model
MB = 1e6
_PLAN = re.compile(r"rank (\d+) of \d+: memory plan: ([\d.]+) MB weights, ([\d.]+) MB cache.*?, ([\d.]+) MB working")
_EMPTY_RANK = """
import ray, torch, torch.distributed, cluster.rank.rank_process, llama_core.backends.parallel, llama_core.backends.runner
import os
from benchmarks.harness.processes import of_programs
print(of_programs([os.getpid()])[0].rss_bytes)
"""


def totals(found: Sequence[Process]) -> dict[str, int]:
    return {
        "processes": len(found),
        "threads": sum(process.threads for process in found),
        "rss_bytes": sum(process.rss_bytes for process in found),
        "pss_bytes": sum(process.pss_bytes for process in found),
    }


def most_under_load(look: Callable[[], list[Process]], load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The maximum of each total while `load` runs, and the load's figures."""
    most: dict[str, Any] = {}
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_EVERY_S):
            now = totals(look())
            most.update({name: max(value, most.get(name, 0)) for name, value in now.items()})

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        figures = load()
    finally:
        done.set()
        sampling.join()
    return most | {"load": {name: figures[name] for name in ("requests", "failed", "output_tok_s")}}


def plans(output: str) -> dict[int, dict[str, float]]:
    """Each rank's plan in bytes, by rank, where the output has it."""
    return {
        int(rank): {"weights": MB * float(weights), "cache": MB * float(cache), "working": MB * float(working)}
        for rank, weights, cache, working in _PLAN.findall(output)
    }


def empty_rank_bytes() -> int:
    done = subprocess.run(
        [sys.executable, "-c", _EMPTY_RANK], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


def against_plan(ranks: Sequence[Process], planned: dict[int, dict[str, float]]) -> dict[str, Any] | None:
    """The largest peak of a rank against the largest plan (ranks are alike); None without a plan."""
    if not ranks or not planned:
        return None
    plan = max(planned.values(), key=lambda parts: sum(parts.values()))
    peak, empty = max(rank.peak_rss_bytes for rank in ranks), empty_rank_bytes()
    return {
        "plan_bytes": plan,
        "planned_bytes": sum(plan.values()),
        "peak_rss_bytes": peak,
        "empty_rank_rss_bytes": empty,
        "peak_of_plan": (peak - empty) / sum(plan.values()),
    }


def show(idle: Sequence[Process], loaded: dict[str, Any], plan: dict[str, Any] | None) -> None:
    rows = [(one.name, one.threads, one.rss_bytes / MB, one.pss_bytes / MB, one.cpu_s) for one in idle]
    print_table("idle", ("process", "threads", "rss MB", "pss MB", "cpu s so far"), rows)
    both = [("idle", totals(idle)), ("under load, at most", loaded)]
    names = ("processes", "threads", "rss_bytes", "pss_bytes")
    print_table("all of them", ("when", *names), [(when, *(total[name] for name in names)) for when, total in both])
    if plan is not None:
        print_table("one rank, bytes", ("figure", "value"), list(plan.items()))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    (how,) = options.how
    with started(options, how) as (program, url):
        first_answer(program, url, options.body.encode())

        def look() -> list[Process]:
            return processes.of_programs([program.process.pid, *program.processes()])

        time.sleep(SETTLED_AFTER_S)
        idle = look()
        requests = uniform_batch(options.requests, options.prompt, options.output, SAFE_VOCABULARY)
        base = url.removesuffix("/v1/completions").removesuffix("/v1/chat/completions")
        loaded = most_under_load(
            look, lambda: asyncio.run(one_load(lambda: HttpSession(base, options.model), requests, options.concurrency))
        )
        time.sleep(LINES_LATE_S)
        ranks = [process for process in look() if process.name == "ray::RankWorker"]
        plan = against_plan(ranks, plans(program.log.read_text(errors="replace")))
    show(idle, loaded, plan)
    return {"idle": totals(idle), "under_load": loaded, "of_idle": idle, "rank": plan}


def main(argv: Sequence[str]) -> None:
    parser = question_parser("memory", __doc__)
    add_start_options(parser)
    parser.add_argument("--model", default="llama-demo", help="its name over HTTP")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each request")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--who", help="the other server's name in the table")
    options = parse_start(parser, argv)
    end_programs_on_sigterm()
    if len(options.how) != 1:
        parser.error("one --how at a time")
    emit("memory", {"who": options.who, "args": dict(options.args), "how": options.how[0], **measure(options)}, options)
