"""On one CUDA device, without Ray: speed, memory, recovery, tests, and every kernel under compute-sanitizer.

    python -m benchmarks gpu --out FILE.json                                Llama-2-7B's shape, random weights in bfloat16
    python -m benchmarks gpu --out FILE.json --only decode offline --shape llama-3-8b --vocab-size 128256
    python -m benchmarks gpu --out FILE.json --device cpu --tiny --shape tiny --dtype float32 --vocab-size 300

Each section is a process with a budget of seconds. Every figure is printed and stored in FILE when it is there, and kept when
the section is cut, fails, or takes the device down with it. The next call goes on with what is missing. The third command
shows on a CPU that everything runs.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.recorder import Recorder, read_run, write_run
from benchmarks.gpu.settings import Settings, add_settings, settings_of
from benchmarks.harness.common import emit, machine, today
from benchmarks.harness.options import question_parser

# The module benchmarks.gpu.sections.NAME has `run(record, settings)`, and so many seconds.
SECTIONS: Final = {
    "decode": 80,
    "offline": 40,
    "mixed": 40,
    "memory": 35,
    "invariance": 55,
    "loading": 40,
    "attention": 60,
    "recovery": 125,
    "checks": 200,
    "memcheck": 150,
}
_LEAST_S: Final = 5.0  # a section is not started with less
_LET_END_S: Final = 10.0  # after SIGTERM, for what the section started
Launch = Callable[[str, Path, Settings, float], bool]  # whether the section ended by itself within the seconds


def launch_process(section: str, path: Path, settings: Settings, seconds: float) -> bool:
    command = [sys.executable, "-u", "-m", "benchmarks.gpu.child", section, str(path), *settings.arguments]
    # A group of its own, so that what the section starts ends with it.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LET_END_S)
    return True


def run_section(section: str, path: Path, settings: Settings, seconds: float, launch: Launch) -> str:
    """Run one section that is not finished. How it stands."""
    record = Recorder(path, section)
    if record.state["status"] in ("done", "unavailable"):
        return str(record.state["status"]) + " before"
    if seconds < _LEAST_S:
        return "no time is left"
    print(f"{section}, at most {seconds:.0f} s", flush=True)
    record.end("running")
    has_ended = launch(section, path, settings, seconds)
    record = Recorder(path, section)
    if not has_ended:
        record.end("cut", f"not done within {seconds:.0f} s")
    elif record.state["status"] == "running":
        record.end("failed", "the process ended without a word")
    return f"{record.state['status']}{': ' * bool(record.state['reason'])}{record.state['reason']}"


def opened(path: Path, settings: Settings, *, is_fresh: bool) -> None:
    """Make the file ready for a run of these settings. Raises ValueError if it holds another run's figures."""
    if is_fresh:
        path.unlink(missing_ok=True)
    run, identity = read_run(path), {"settings": settings.as_data(), "commit": machine()["commit"]}
    different = [name for name, value in identity.items() if run.get(name, value) != value]
    if different:
        raise ValueError(f"{path} holds another run (other {', '.join(different)}): give --fresh or another --out")
    write_run(path, run | identity | {"date": today()})


def main(argv: Sequence[str], launch: Launch = launch_process) -> None:
    parser = question_parser("gpu", __doc__)
    add_settings(parser)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for all sections; the next call runs the rest")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has measured")
    parser.add_argument("--out", type=Path, required=True, help="the file of the figures")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the section ends too
    begin, settings, path = time.monotonic(), settings_of(options), options.out
    try:
        opened(path, settings, is_fresh=options.fresh)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    said = run_section("device", path, settings, 120, launch)
    if not said.startswith("done"):
        parser.exit(2, f"{said}\n")
    for section in options.only:
        left = options.seconds - (time.monotonic() - begin)
        print(f"{section}: {run_section(section, path, settings, min(SECTIONS[section], left), launch)}", flush=True)
    run = read_run(path)
    device = run["sections"]["device"]["figures"]["device"]["name"]
    emit("gpu", run | {"device": device, "summary": summary(run["sections"])}, argparse.Namespace(json=path))


def summary(sections: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """The figures that stand for the run; None where a section has not measured its own."""

    def of(section: str, *names: str) -> float | None:
        value: Any = sections.get(section, {}).get("figures", {})
        for name in names:
            value = value.get(name, {})
        return value.get("median") if isinstance(value, dict) else value

    floor, step = of("decode", "decode_64", "floor_ms"), of("decode", "decode_64", "step_ms")
    return {
        "batch_1_tok_s": of("decode", "decode_1", "tok_s"),
        "batch_1_share": of("decode", "decode_1", "share_of_bandwidth"),
        "batch_64_of_floor": step / floor if step and floor else None,
        "prompt_share": of("decode", "prompt", "share_of_products"),
        "offline_tok_s": of("offline", "output_tok_s"),
        "kill_to_token_s": of("recovery", "kill_to_token_s"),
        "taken_of_plan": of("memory", "taken_of_plan"),
    }
