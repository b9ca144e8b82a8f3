"""The name of this machine's CPU and the instruction sets that it has, as the kernel reports them."""

import platform
from collections.abc import Sequence
from pathlib import Path


def cpu_name() -> str:
    return _cpu_info().get("model name", platform.machine())


def cpu_flags(known: Sequence[str]) -> list[str]:
    """Those of the `known` instruction sets that the CPU has."""
    info = _cpu_info()
    flags = (info.get("flags") or info.get("Features") or "").split()
    return [flag for flag in known if flag in flags]


def _cpu_info() -> dict[str, str]:
    """The kernel's description of the first CPU; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
