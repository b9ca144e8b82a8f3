"""Shared by all benchmarks: medians with their spread, facts about the machine, tables, the JSON result, waiting for idleness.

Standard library only, so that a peer's own environment can import it too.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
# The CPU flags by which libraries choose the kernels of matrix products and bfloat16 loops.
_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
_PACKAGES = ("torch", "ray", "numpy", "sentencepiece", "uvloop", "msgspec")
_VARIABLES = ("OMP_", "KMP_", "GOMP_", "MKL_", "LD_PRELOAD", "LLAMA_", "RAY_", "VLLM_", "TORCH")


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of a figure: median, quartiles and extremes."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        assert ordered, "nothing was measured"
        low, high = percentile(ordered, 25), percentile(ordered, 75)
        return cls(statistics.median(ordered), low, high, ordered[0], ordered[-1], len(ordered))

    def scaled(self, factor: float) -> "Spread":
        """Of the measurements times a positive factor."""
        median, low, high, least, most = (
            factor * figure for figure in (self.median, self.low, self.high, self.least, self.most)
        )
        return Spread(median, low, high, least, most, self.count)

    @property
    def relative(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        return (self.high - self.low) / 2 / abs(self.median) if self.median else 0.0

    def __str__(self) -> str:
        return f"{number(self.median)} ±{100 * self.relative:.0f}%" if self.count > 1 else number(self.median)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks. `values` in any order, at least one."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def number(value: str | float | None) -> str:
    """A value for a table: three significant digits, whole thousands, "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, str | bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def interval(values: Sequence[float]) -> dict[str, float]:
    """The mean of at least two values, with its 95 % interval by Student's distribution."""
    center, freedom = statistics.mean(values), len(values) - 1
    z = 1.96
    # Abramowitz and Stegun, 26.7.5: the quantile of t by that of the normal distribution.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    margin = t * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": center, "low": center - margin, "high": center + margin, "count": len(values)}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table: the first column left-aligned, the others right-aligned."""
    texts = [[cell if isinstance(cell, str) else shown(cell) for cell in row] for row in rows]
    widths = [max(3, *(len(line[i]) for line in [list(columns), *texts])) for i in range(len(columns))]
    lines = []
    for line in (list(columns), *texts):
        cells = [
            line[0].ljust(widths[0]),
            *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    rule = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def shown(figure: object) -> str:
    """A figure for people. A Spread, or one that was read from a result, as its median and half its quartiles' distance."""
    if isinstance(figure, dict) and figure.keys() == Spread.__dataclass_fields__.keys():
        return str(Spread(**figure))
    if isinstance(figure, dict):
        return ", ".join(f"{name} {shown(value)}" for name, value in figure.items())
    if isinstance(figure, list | tuple):
        return ", ".join(map(shown, figure))
    return number(figure) if isinstance(figure, str | int | float | None) else str(figure)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print(f"\n{title}\n\n{table(columns, rows)}", flush=True)


def emit(benchmark: str, figures: dict[str, Any], options: argparse.Namespace | None = None) -> dict[str, Any]:
    """Print the result as one line of JSON, the last line, and write it to --json. A Spread becomes an object."""
    result = {"benchmark": benchmark, "command": command_line(), "date": today(), "machine": machine(), **figures}
    result = as_json(result)
    target: Path | None = getattr(options, "json", None)
    if target is not None:
        target.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, ensure_ascii=False), flush=True)
    return result


def as_json(figures: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it: a Spread as an object, numbers of six significant digits."""
    return dict(json.loads(json.dumps(figures, default=_plain), parse_float=lambda text: float(f"{float(text):.6g}")))


def last_json(output: str) -> dict[str, Any]:
    """The last line that is a JSON object; a peer may log after it. Raises ValueError if there is none."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    raise ValueError("the output has no line of JSON")


# The machine.


def machine() -> dict[str, Any]:
    """The facts that figures depend on: processor, memory, versions, settings, commit, load average."""
    cpu = _cpu_info()
    return {
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "cpu_family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in _FLAGS if flag in cpu.get("flags", "").split()],
        "caches_bytes": cache_sizes(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version()} | versions(_PACKAGES),
        "settings": {name: public(value) for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        "commit": _commit(),
        "load_average": os.getloadavg()[0],
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of the installed ones of `packages`."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cache_sizes() -> dict[str, int]:
    """Data caches of the first core in bytes, by level: "L1", "L2", "L3". Empty if the system does not report them.

    A virtual machine reports its host's L3, of which it may have only a part.
    """
    sizes: dict[str, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            level, size = (index / "level").read_text().strip(), (index / "size").read_text().strip()
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            sizes[f"L{level}"] = int(size[:-1]) * 1024
    return sizes


def command_line() -> str:
    """The command that repeats this run, without the machine's paths: `python -m benchmarks NAME ...`."""
    program = public(sys.argv[0])
    is_ours = program.startswith("benchmarks/")
    module = program.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
    return shlex.join([*(["python", "-m", module] if is_ours else [program]), *map(public, sys.argv[1:])])


def public(text: str) -> str:
    """`text` with absolute paths cut to the part inside the repository, or to their last two parts."""
    return re.sub(r"(?<![^\s:=])/(?:[^/\s:]+/)+(?=[^/\s:]+/[^/\s:]+)", ".../", text.replace(f"{REPOSITORY}/", ""))


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


# Idleness.


def busy_cores(window_s: float = 0.5) -> float:
    """Average number of busy cores over the next `window_s` seconds; 0.0 on an idle machine."""
    busy_before, ticks_before = _cpu_ticks()
    time.sleep(window_s)
    busy, ticks = _cpu_ticks()
    return (busy - busy_before) / max(1, ticks - ticks_before) * (os.cpu_count() or 1)


def wait_quiet(most_busy_cores: float = 0.2, patience_s: float = 120.0) -> None:
    """Wait until the machine is idle, at most `patience_s`."""
    deadline = time.monotonic() + patience_s
    while busy_cores() > most_busy_cores and time.monotonic() < deadline:
        time.sleep(0.5)


def _cpu_ticks() -> tuple[int, int]:
    """Busy ticks and all ticks of all cores since the machine's start."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, idle, iowait, *others = fields[:8]  # the last two of ten are included in user and nice
    return user + nice + system + sum(others), user + nice + system + idle + iowait + sum(others)


def _cpu_info() -> dict[str, str]:
    """/proc/cpuinfo of the first core; empty if the file is missing."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _commit() -> str:
    """The short hash of the checked-out commit, with "-dirty" if tracked files have changed."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _plain(value: object) -> object:
    """Convert an object that json cannot write."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return public(str(value))
    raise TypeError(f"{type(value).__name__} cannot be written in a result")
