"""Writes the tables of docs/performance.md from benchmarks/results, so that no figure on the page is typed by hand.

    python -m benchmarks report

A table stands between `<!-- NAME -->` and `<!-- /NAME -->` and is replaced. The text around it is kept. Results of another
machine lie in a folder of benchmarks/results, and the names of their tables begin with it: `<!-- avx2/paired -->`.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import paired as pairs
from benchmarks.harness.common import REPOSITORY, number, table
from benchmarks.harness.options import command_parser

Result = dict[str, Any]
Rows = Iterator[Sequence[object]]
PAGE = REPOSITORY / "docs" / "performance.md"
RESULTS = REPOSITORY / "benchmarks" / "results"


def read_results(directory: Path) -> list[Result]:
    """Every object in the directory's JSON files, in the order of the file names, and each in its folder there as `folder`."""
    found: list[Result] = []
    for path in sorted((*directory.glob("*.json"), *directory.glob("*/*.json"))):
        read = json.loads(path.read_text())
        folder = "" if path.parent == directory else path.parent.name
        found += [{**one, "folder": folder} for one in (read if isinstance(read, list) else [read])]
    return found


def machine(results: Sequence[Result]) -> str:
    """The machine of the results; a property with several values where they differ."""
    seen: dict[str, set[str]] = {}
    for result in results:
        if result["benchmark"] not in TABLES or result["benchmark"] == "gpu":  # measured elsewhere
            continue
        known = result["machine"]
        caches = ", ".join(f"{level} {size >> 10:,} KiB" for level, size in known["caches_bytes"].items())
        for what, value in (
            ("processor", f"{known['cpu']} (family/model {known['cpu_family_model']}), {known['cores']} cores"),
            ("instructions", ", ".join(known["flags"])),
            ("caches", caches),
            ("memory", f"{known['memory_bytes'] / 2**30:.0f} GiB"),
            ("system", known["system"]),
            ("versions", ", ".join(f"{name} {version}" for name, version in known["versions"].items())),
            ("dates", result["date"]),
        ):
            seen.setdefault(what, set()).add(value)
    return table(["", "value"], [(what, "; ".join(sorted(all_))) for what, all_ in seen.items()])


def cases(*figures: str) -> Callable[[Result], Rows]:
    """A row for each case of a result."""

    def rows(result: Result) -> Rows:
        for name, case in result["cases"].items():
            yield f"{result['model']}, {name}", *(case[figure] for figure in figures)

    return rows


def paired(result: Result) -> Rows:
    clients = f", {result['concurrency']} clients" if result["question"] == "online" else ""
    for what, *cells in pairs.rows_of(result):
        yield f"{result['model']} {result['dtype']}, {result['question']}{clients}: {what}", *cells


def arrivals(result: Result) -> Rows:
    """A row for each load and contender but the last, with the last one's figures beside its own."""
    figures = ("ttft_p50_ms", "ttft_p99_ms", "per_token_p50_ms", "output_tok_s")
    for load, one in result["loads"].items():
        *_, (last, theirs) = one["contenders"].items()
        for name, ratios in one["ratios"].items():
            ours = one["contenders"][name]
            values = [f"**{ratios[each]:.2f}** ({_middle(ours[each])} / {_middle(theirs[each])})" for each in figures]
            yield f"{load}: {name} / {last}", *values, ours["requests"]


def quality(result: Result) -> Rows:
    for name, case in result["cases"].items():
        what = f"{result['model']}, {result['tokens']:,} tokens of {result['text']}, {name}"
        yield what, f"{case['perplexity']:.4f}", f"{100 * case['loss']:+.3f} %"


def startup(result: Result) -> Rows:
    model = Path(result["args"].get("ckpt_dir", "demo")).name
    for how, case in result["how"].items():
        what = f"{model}, {'cold' if result['cold'] else 'warm'} page cache, {how}"
        yield what, case["seconds"], case["reached_s"].get("weights are loaded")


def memory(result: Result) -> Rows:
    who = result.get("who") or f"ours, {Path(result['args'].get('ckpt_dir', 'demo')).name}"
    for when, one in (("idle", result["idle"]), ("under load", result["under_load"])):
        plan = result["rank"]["peak_of_plan"] if result["rank"] and when == "under load" else None
        yield f"{who}, {when}", one["processes"], one["threads"], one["rss_bytes"] / 1e9, one["pss_bytes"] / 1e9, plan


OVERLOAD = ("goodput_tok_s", "served_requests_s", "ttft_p50_ms", "ttft_p99_ms", "refused_p99_ms",
            "whole", "refused", "lost")  # fmt: skip


def overload(result: Result) -> Rows:
    for what, one in (
        (f"the peak, {result['peak_clients']} clients", result["peak"]),
        (f"{result['factor']:g} times that for {result['seconds']:g} s", result["overload"]),
        ("the peak again", result["peak_again"]),
    ):
        yield f"{result['model']}, queue {result.get('queue')}: {what}", *(one[figure] for figure in OVERLOAD)
    first = result["ttft_p99_of_peak"]
    ratios = f"**{result['goodput_of_peak']:.2f}**", None, None, f"**{first:.2f}**" if first else None
    yield "share of the peaks", *ratios, None, None, None, None


def grammars(result: Result) -> Rows:
    mask, ratio = result["mask_us"], result["ratio"]
    model = f"{result['model']}, {result['rows_with_grammar']} of {result['rows']} rows"
    is_enough = ratio.get("count", ratio.get("pairs", 0)) >= 20  # "pairs" in older results
    steps = f"{ratio['mean']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if is_enough else None
    yield model, mask["median"], mask["p90"], mask["p99"], f"{100 * result['share_of_processor_time']:.2f} %", steps


def slow_grammars(result: Result) -> Rows:
    """A row for each load, with the figures of the earlier commit before those of the later one."""
    loads = {"alone": "nothing", "ambiguous": "an answer in an ambiguous grammar"}
    loads |= {"schemas": "new schemas of 58 kB", "refused": "new schemas that are refused as too large"}
    figures = ("tok_s", "between_p50_ms", "between_p99_ms", "longest_gap_ms", "requests_s")
    for load, words in loads.items():
        both = [[result[when][f"{load}_{figure}"] for figure in figures] for when in ("before", "after")]
        # Only requests with schemas come one after the other and are counted.
        yield (
            words,
            *(
                f"{_middle(one)} / {_middle(other)}" if other["most"] else None
                for one, other in zip(*both, strict=True)
            ),
        )


GPU = {
    "batch_1_tok_s": "batch 1 tok/s",
    "batch_1_share": "of bandwidth",
    "batch_64_of_floor": "batch 64, times its bytes",
    "prompt_share": "prompt, of products",
    "offline_tok_s": "offline tok/s",
    "kill_to_token_s": "kill to token, s",
    "taken_of_plan": "memory, of plan",
}


def gpu(result: Result) -> Rows:
    settings, commit = result["settings"], result["machine"]["commit"]
    name = f"{result['device']}, {settings['shape']} {settings['dtype']}, commit {commit}"
    yield name, *(result["summary"][each] for each in GPU)


def _middle(figure: Any) -> str:
    return number(figure["median"] if isinstance(figure, dict) else figure)


# By the name of the marker on the page, which is that of the benchmark: the columns, and the rows of one result.
TABLES: dict[str, tuple[Sequence[str], Callable[[Result], Rows]]] = {
    "decode": (
        ("model, weights", "tok/s", "step ms", "bytes a token", "GB/s", "of memory", "of as many bytes"),
        cases("decode_tok_s", "step_ms", "bytes_per_token", "read_gb_s", "share_of_memory", "share_of_same_size"),
    ),
    "prefill": (
        ("model, weights", "tok/s", "GFLOP/s", "matrix product", "share"),
        cases("prefill_tok_s", "gflop_s", "matmul_gflop_s", "share_of_matmul"),
    ),
    "paired": (pairs.COLUMNS, paired),
    "arrivals": (("load", "TTFT p50, ms", "TTFT p99, ms", "time per token p50, ms", "tok/s", "requests"), arrivals),
    "quality": (("weights", "perplexity", "loss"), quality),
    "startup": (("start", "s to the first good answer", "weights loaded after"), startup),
    "memory": (
        ("everything that serves", "processes", "threads", "RSS GB", "PSS GB", "a rank's peak / plan"),
        memory,
    ),
    "overload": (("load", "tok/s", "req/s", "TTFT p50 ms", "p99", "refused p99 ms", *OVERLOAD[5:]), overload),
    "grammars": (("model", "a mask, us", "p90", "p99", "of processor time", "steps with / without"), grammars),
    "slow_grammars": (
        ("beside", "tok/s", "between tokens p50, ms", "p99, ms", "longest, ms", "slow requests/s"),
        slow_grammars,
    ),
    "gpu": (("device, model", *GPU.values()), gpu),
}


def fill(page: str, results: Sequence[Result]) -> str:
    """The page with its tables replaced. Raises KeyError for a marker without a table."""

    def replace(found: re.Match[str]) -> str:
        marker = found[1]
        folder, _, name = marker.rpartition("/")
        here = [one for one in results if one.get("folder", "") == folder]
        if name == "machine":
            made = machine(here)
        else:
            columns, rows = TABLES[name]
            made = table(columns, [list(row) for one in here if one["benchmark"] == name for row in rows(one)])
        return f"<!-- {marker} -->\n{made}\n<!-- /{marker} -->"

    return re.sub(r"<!-- ([\w/]+) -->\n.*?<!-- /\1 -->", replace, page, flags=re.DOTALL)


def main(argv: Sequence[str]) -> None:
    parser = command_parser("report", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(argv)
    options.page.write_text(fill(options.page.read_text(), read_results(options.results)))
    print(options.page)
