"""The time from the command to the first good answer, by phases.

    python -m benchmarks startup                                            the demo model, as `make serve` starts it
    python -m benchmarks startup ckpt_dir=DIRECTORY model_parallel_size=1   another one
    python -m benchmarks startup --how serve-run                            by plain `serve run`
    python -m benchmarks startup --how serve-run --how up                   both, in turn
    python -m benchmarks startup --url URL --body JSON -- COMMAND ...       any other OpenAI-compatible server

A good answer is a completion of one token or more. The clock starts before the command; a client sends a request every 20 ms.
Phases come from the times of the server's log lines. `--cold` drops the files from the page cache first.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import processes
from benchmarks.harness.common import REPOSITORY, Spread, emit, print_table, wait_quiet
from benchmarks.harness.options import question_parser
from benchmarks.harness.programs import (
    Program,
    ProgramFailed,
    end_programs_on_sigterm,
    free_port,
    running,
    write_config,
)

ASK_EVERY_S = 0.02
LIMIT_S = 600.0
LINES_LATE_S = 1.5  # Ray shows its processes' lines with about this delay
COMMANDS = {
    "up": [sys.executable, "-m", "cli", "up", "-v"],  # whose output has the lines of Ray and of the ranks
    "serve-run": [str(Path(sys.executable).parent / "serve"), "run"],
}
# The phase that ends with a matching line. Of several lines the last counts ("loaded": one for each rank), or the first.
PHASES = {
    "Ray's own processes run": ("first", r"Started a local Ray instance"),
    "Serve's controller runs": ("first", r"controller \d+ -- "),
    "the application is built": ("first", r"Imported and built app"),
    "the ranks' processes run": ("last", r"cpu_pinning cores="),
    "weights are loaded": ("last", r"rank_process loaded "),
    "the replica is ready": ("first", r"ready after [\d.]+ s"),
}
ANSWERED, CPU = "first good answer", "processor time of all its processes"
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


def first_answer(program: Program, url: str, body: bytes) -> float:
    """The time (time.time) of the first good answer. Raises ProgramFailed."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if program.process.poll() is not None:
            raise ProgramFailed(f"ended with status {program.process.returncode}:\n{program.said()}")
        request = urllib.request.Request(url, body, {"Content-Type": "application/json", "Authorization": "Bearer x"})
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=120) as response:
            if is_good(json.loads(response.read())):
                return time.time()
        time.sleep(ASK_EVERY_S)
    raise ProgramFailed(f"{url} gave no good answer within {LIMIT_S:.0f} s:\n{program.said()}")


def is_good(answer: dict[str, Any]) -> bool:
    choices = answer.get("choices") or [{}]
    text = choices[0].get("text") or (choices[0].get("message") or {}).get("content")
    return bool(text) or (answer.get("usage") or {}).get("completion_tokens", 0) > 0


def points(output: str, began: float) -> dict[str, float]:
    """Seconds from `began` (time.time) to each phase that the output shows."""
    found: dict[str, float] = {}
    for line in output.splitlines():
        if not (stamp := _STAMP.search(line)):
            continue
        whole, _, thousandths = stamp[0].partition(",")
        when = time.mktime(time.strptime(whole, "%Y-%m-%d %H:%M:%S")) + int(thousandths) / 1000 - began
        for name, (which, pattern) in PHASES.items():
            if (which == "last" or name not in found) and re.search(pattern, line):
                found[name] = when
    return found


@contextlib.contextmanager
def started(options: argparse.Namespace, how: str) -> Iterator[tuple[Program, str]]:
    """The program that is measured, and where it answers."""
    if options.command:
        with running(options.command, dict(options.env)) as program:
            yield program, options.url
        return
    # A cluster of its own; Ray shows each rank's lines instead of one for all.
    env = {"RAY_ADDRESS": "local", "RAY_DEDUP_LOGS": "0"} | dict(options.env)
    port = free_port()
    with TemporaryDirectory(prefix="llama-bench-") as directory:
        config = write_config(Path(directory) / "serve_config.yaml", port, dict(options.args))
        with running([*COMMANDS[how], str(config)], env) as program:
            yield program, f"http://127.0.0.1:{port}/v1/completions"


def measure(options: argparse.Namespace, how: str) -> dict[str, float]:
    """Seconds from the command to each point, the last of which is the answer; and the processor time until then."""
    if options.cold:
        forget_files([Path(sys.prefix), Path(sys.base_prefix) / "lib", *options.forget])
    wait_quiet(patience_s=options.patience)
    began = time.time()
    with started(options, how) as (program, url):
        answered = first_answer(program, url, options.body.encode())
        cpu_s = sum(process.cpu_s for process in processes.of_programs([program.process.pid, *program.processes()]))
        time.sleep(LINES_LATE_S)
        reached = points(program.log.read_text(errors="replace"), began)
    return reached | {ANSWERED: answered - began, CPU: cpu_s}


def forget_files(directories: list[Path]) -> None:
    """Ask the kernel to drop these directories' files from the page cache; pages that another process has mapped stay."""
    for directory in directories:
        for path in directory.rglob("*"):
            with contextlib.suppress(OSError):
                if path.is_symlink() or not path.is_file():
                    continue
                file = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(file)


def show(name: str, starts: list[dict[str, float]]) -> dict[str, Any]:
    """Print the table; the figures."""
    reached = {
        point: Spread.of(start[point] for start in starts if point in start)
        for point in (*PHASES, ANSWERED, CPU)
        if any(point in start for start in starts)
    }
    print_table(f"{name}: seconds, median of {len(starts)}", ("until", "since the command"), reached.items())
    each = [start[ANSWERED] for start in starts]
    return {"seconds": reached[ANSWERED], "cpu_s": reached.pop(CPU), "reached_s": reached, "each_s": each}


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value


def add_start_options(parser: argparse.ArgumentParser) -> None:
    """The options that `started` reads."""
    parser.add_argument(
        "args", nargs="*", type=pair, metavar="NAME=VALUE", help="they replace those of serve_config.yaml"
    )
    parser.add_argument("--how", action="append", choices=COMMANDS, help="up, as `make serve` does, if absent")
    parser.add_argument("--env", action="append", type=pair, default=[], metavar="NAME=VALUE", help="for the server")
    parser.add_argument("--url", help="where another server answers completions; its command follows after --")
    parser.add_argument("--body", default='{"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}')


def parse_start(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments after -- are another server's command."""
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(list(arguments[:split]))
    options.command = list(arguments[split + 1 :])
    if bool(options.command) != bool(options.url):
        parser.error("--url and a command after -- go together")
    options.how = ["command"] if options.command else options.how or ["up"]
    return options


def main(argv: Sequence[str]) -> None:
    parser = question_parser("startup", __doc__)
    add_start_options(parser)
    parser.add_argument("--repetitions", type=int, default=5, help="of each --how, in turn")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each start")
    parser.add_argument("--forget", action="append", type=Path, default=[], help="another directory for --cold")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine")
    options = parse_start(parser, argv)
    end_programs_on_sigterm()
    options.forget.append(Path(dict(options.args).get("ckpt_dir", REPOSITORY / "demo")))
    starts: dict[str, list[dict[str, float]]] = {how: [] for how in options.how}
    for _ in range(options.repetitions):
        for how, done in starts.items():
            done.append(measure(options, how))
    result = {how: show(how, done) for how, done in starts.items()}
    emit("startup", {"args": dict(options.args), "cold": options.cold, "how": result}, options)
