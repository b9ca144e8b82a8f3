"""The tables of GPUs: those that were measured, and what the compiler says of the kernels."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.common import number
from benchmarks.report.markdown import table

COLUMNS = {
    "batch_1_tok_s": "batch 1 tok/s",
    "batch_1_share": "of bandwidth",
    "batch_64_of_floor": "batch 64, times its bytes",
    "prompt_share": "prompt, of products",
    "offline_tok_s": "offline tok/s",
    "offline_ratio": "of transformers",
    "kill_to_token_s": "kill to token, s",
    "taken_of_plan": "memory, of plan",
    "two_ranks_speedup": "batch 1 on 2 GPUs, times as fast",
}


def gpu(results: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            f"{result['device']}, {result['settings']['shape']} {result['settings']['dtype']}",
            *(_cell(result["summary"], name) for name in COLUMNS),
        )
        for result in results
    ]
    return table(["device, model", *COLUMNS.values()], rows)


def _cell(summary: Mapping[str, float | None], name: str) -> float | str | None:
    at_least = summary.get(f"{name}_at_least")
    return summary[name] if at_least is None else f"at least {number(at_least)}"


# By a kernel's name: that of the kernel which did its work before.
PREDECESSORS = {"_attend": "_attend_split"}
COMPILED = {"registers": "registers", "spills": "spilled bytes", "shared": "shared bytes", "occupancy": "occupancy"}


def gpu_check(results: Sequence[dict[str, Any]]) -> str:
    """The worst variant of each kernel and target, with what it was before in brackets, where that differs."""
    rows: list[tuple[object, ...]] = []
    for result in results:
        before = {(row["kernel"], row["sm"]): row for row in result["before"]["rows"]}
        for row in result["rows"]:
            kernel = row["kernel"]
            old = before.get((PREDECESSORS.get(kernel, kernel), row["sm"]))
            cells = (_beside(row[name], old[name] if old else None) for name in COMPILED)
            rows.append((f"`{kernel}`, sm_{row['sm']}", row["variants"], *cells))
    return table(["kernel, target", "variants", *COMPILED.values()], rows)


def _beside(now: float, before: float | None) -> str:
    return number(now) if before is None or before == now else f"{number(now)} ({number(before)})"
