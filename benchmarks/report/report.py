"""Writes the tables of docs/performance.md from benchmarks/results, so that no figure on the page is typed by hand.

    python -m benchmarks report

A table stands between `<!-- NAME -->` and `<!-- /NAME -->` and is replaced. The text around it is kept. Results of another
machine lie in a folder of benchmarks/results, and the names of their tables begin with it: `<!-- avx2/paired -->`.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.common import REPOSITORY, number
from benchmarks.harness.options import command_parser
from benchmarks.report.gpu import gpu, gpu_check
from benchmarks.report.markdown import cell, table

Result = dict[str, Any]
RENAMED_PARTS = {"draw": "sample"}  # a part's name in older results, and its present name
ELSEWHERE = ("gpu", "gpu_check")  # not on the machine of the other results
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
        if result["benchmark"] not in TABLES or result["benchmark"] in ELSEWHERE:
            continue
        known = result["machine"]
        caches = ", ".join(f"{level} {size >> 10:,} KiB" for level, size in known["caches_bytes"].items())
        versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
        for what, value in (
            ("processor", f"{known['cpu']} (family/model {known['cpu_family_model']}), {known['cores']} cores"),
            ("instructions", ", ".join(known["flags"])),
            ("caches", caches),
            ("memory", f"{known['memory_bytes'] / 2**30:.0f} GiB"),
            ("system", known["system"]),
            ("versions", versions),
            ("dates", result["date"]),
        ):
            seen.setdefault(what, set()).add(value)
    return table(["", "value"], [(what, "; ".join(sorted(all_))) for what, all_ in seen.items()])


def limits(results: Sequence[Result]) -> str:
    rows: list[tuple[object, ...]] = []
    for result in results:
        for before, after in zip(result["bandwidth"], result["bandwidth_after"], strict=True):
            what = f"reading {before['buffer_bytes'] >> 20:,} MiB on {before['threads']} threads, GB/s"
            rows.append((what, before["gb_s"], after["gb_s"]))
        rows += [
            (f"matrix product 2048^3, {dtype}, GFLOP/s", rate, None) for dtype, rate in result["matmul_gflop_s"].items()
        ]
    return table(["limit", "median", "again, afterwards"], rows)


def _cases(results: Sequence[Result], figures: Sequence[str]) -> list[tuple[object, ...]]:
    return [
        (f"{result['model']}, {name}", *(case[figure] for figure in figures))
        for result in results
        for name, case in result["cases"].items()
    ]


def decode(results: Sequence[Result]) -> str:
    figures = ("decode_tok_s", "step_ms", "bytes_per_token", "read_gb_s", "share_of_memory", "share_of_same_size")
    columns = ["model, weights", "tok/s", "step ms", "bytes a token", "GB/s", "of memory", "of as many bytes"]
    return table(columns, _cases(results, figures))


def prefill(results: Sequence[Result]) -> str:
    figures = ("prefill_tok_s", "gflop_s", "matmul_gflop_s", "share_of_matmul")
    return table(["model, weights", "tok/s", "GFLOP/s", "matrix product", "share"], _cases(results, figures))


def step(results: Sequence[Result]) -> str:
    rows: list[tuple[object, ...]] = []
    for result in results:
        for case in result["cases"]:
            place = f"{result['model']}, {result['weights']}, {case['rows']} rows, context {case['context']}"
            rows.append((f"**{place}**", case["step_ms"], case["read_bytes"] / 1e6, case["least_ms"]))
            rows += [
                (
                    RENAMED_PARTS.get(part["part"], part["part"]),
                    part["ms"],
                    part["read_bytes"] / 1e6 or None,
                    part["least_ms"] or None,
                )
                for part in case["parts"]
            ]
    return table(["part", "ms", "MB read", "least ms"], rows)


def growth(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        for series in result["series"]:
            found = series["growth"]
            other = "context" if series["vary"] == "rows" else "rows"
            rows.append(
                (
                    f"{result['model']}, {result['weights']}: by {series['vary']}, {other} {series['fixed']}",
                    f"{series['points'][0][series['vary']]} .. {series['points'][-1][series['vary']]}",
                    found["line"]["at_zero"],
                    1e3 * found["line"]["slope"],
                    1e3 * found["third_quarter"],
                    1e3 * found["last_quarter"],
                    "**yes**" if found["worse_than_linear"] else "no",
                )
            )
    columns = ["series", "range", "ms at zero", "µs each", "third quarter", "last quarter", "worse than linear"]
    return table(columns, rows)


def prefix(results: Sequence[Result]) -> str:
    rows = [
        (
            f"{result['model']}, {result['weights']}, {result['requests']} requests behind {result['shared_tokens']}",
            result["cases"]["not shared"]["prefill_tokens"],
            result["cases"]["shared"]["prefill_tokens"],
            result["fewer_prefill_tokens"],
            result["faster"],
            "same" if result["same_tokens"] else "**differ**",
        )
        for result in results
    ]
    return table(["load", "prompt tokens computed", "shared", "times fewer", "times faster", "texts"], rows)


def speculation(results: Sequence[Result]) -> str:
    rows = [
        (
            f"{result['model']}, {result['weights']}: {text}",
            case["with"],
            case["without"],
            case["ratio"],
            case["tokens_per_step"],
            "same" if case["same_tokens"] else "**differ**",
        )
        for result in results
        for text, case in result["cases"].items()
    ]
    return table(["text", "tok/s with", "without", "ratio", "tokens a step", "tokens"], rows)


def paired(results: Sequence[Result]) -> str:
    """One row for each figure and contender, ratios as measured: below one is better where less is better."""
    rows: list[tuple[object, ...]] = []
    for result in results:
        first = result["first"]
        clients = f", {result['concurrency']} clients" if result["question"] == "online" else ""
        for name, figures in result["ratios"].items():
            for figure, one in figures.items():
                less = " (less is better)" if one["lower_is_better"] else ""
                ratio, steady = one["ratio"], one["steady"]
                rows.append(
                    (
                        f"{result['model']} {result['dtype']}, {result['question']}{clients}: {figure}{less}",
                        f"{first} {cell(result['contenders'][first][figure])}",
                        f"{name} {cell(result['contenders'][name][figure])}",
                        f"**{ratio['median']:.2f}**",
                        f"{ratio['least']:.2f} .. {ratio['most']:.2f}",
                        f"{steady['median']:.2f} ({steady['count']} of {ratio['count']})" if steady else None,
                    )
                )
    return table(["figure", "us", "other", "ratio", "least .. most", "steady rounds"], rows)


def quality(results: Sequence[Result]) -> str:
    rows = [
        (
            f"{result['model']}, {result['tokens']:,} tokens of {result['text']}, {name}",
            f"{case['perplexity']:.4f}",
            f"{100 * case['loss']:+.3f} %",
        )
        for result in results
        for name, case in result["cases"].items()
    ]
    return table(["weights", "perplexity", "loss"], rows)


def startup(results: Sequence[Result]) -> str:
    rows: list[tuple[object, ...]] = []
    for result in results:
        model = Path(result["args"].get("ckpt_dir", "demo")).name
        for how, case in result["how"].items():
            what = f"{model}, {'cold' if result['cold'] else 'warm'} page cache, {how}"
            rows.append((what, case["seconds"], case["reached_s"].get("weights are loaded")))
    return table(["start", "s to the first good answer", "weights loaded after"], rows)


def memory(results: Sequence[Result]) -> str:
    rows: list[tuple[object, ...]] = []
    for result in results:
        who = result.get("who") or f"ours, {Path(result['args'].get('ckpt_dir', 'demo')).name}"
        for when, one in (("idle", result["idle"]), ("under load", result["under_load"])):
            plan = result["rank"]["peak_of_plan"] if result["rank"] and when == "under load" else None
            rows.append(
                (
                    f"{who}, {when}",
                    one["processes"],
                    one["threads"],
                    one["rss_bytes"] / 1e9,
                    one["pss_bytes"] / 1e9,
                    plan,
                )
            )
    return table(["everything that serves", "processes", "threads", "RSS GB", "PSS GB", "a rank's peak / plan"], rows)


def overload(results: Sequence[Result]) -> str:
    rows: list[tuple[object, ...]] = []
    figures = (
        "goodput_tok_s",
        "served_requests_s",
        "ttft_p50_ms",
        "ttft_p99_ms",
        "refused_p99_ms",
        "whole",
        "refused",
        "lost",
    )
    for result in results:
        queue = f", queue {result['queue']}" if "queue" in result else ""
        for what, one in (
            (f"the peak, {result['peak_clients']} clients", result["peak"]),
            (f"{result['factor']:g} times that for {result['seconds']:g} s", result["overload"]),
            ("the peak again", result["peak_again"]),
        ):
            rows.append((f"{result['model']}{queue}: {what}", *(one[figure] for figure in figures)))
        first = result["ttft_p99_of_peak"]
        rows.append(
            (
                "share of the peaks",
                f"**{result['goodput_of_peak']:.2f}**",
                None,
                None,
                f"**{first:.2f}**" if first else None,
            )
            + (None,) * 4
        )
    columns = ["load", "tok/s", "req/s", "TTFT p50 ms", "p99", "refused p99 ms", "whole", "refused", "lost"]
    return table(columns, rows)


def arrivals(results: Sequence[Result]) -> str:
    """A row for each load and contender but the last, with the last one's figures beside its own."""
    figures = ("ttft_p50_ms", "ttft_p99_ms", "per_token_p50_ms", "output_tok_s")
    rows: list[tuple[object, ...]] = []
    for result in results:
        for load, one in result["loads"].items():
            *_, (last, theirs) = one["contenders"].items()
            for name, ratios in one["ratios"].items():
                ours = one["contenders"][name]
                cells = [
                    f"**{ratios[figure]:.2f}** ({_short(ours[figure])} / {_short(theirs[figure])})"
                    for figure in figures
                ]
                rows.append((f"{load}: {name} / {last}", *cells, ours["requests"]))
    return table(["load", "TTFT p50, ms", "TTFT p99, ms", "time per token p50, ms", "tok/s", "requests"], rows)


def grammars(results: Sequence[Result]) -> str:
    """A row for each kind of answers of each model."""
    rows: list[tuple[object, ...]] = []
    for result in results:
        model = f"{result['model']}, {result['rows_with_grammar']} of {result['rows']} rows"
        answers = [("without end", result, result["ratio"])]
        for limit, found in result["ordinary_answers_by_limit"].items():
            answers.append((f"at most {limit} tokens", found, found["ratio_of_all_steps"]))
        for what, found, ratio in answers:
            mask_us = found["mask_us"]
            steps = f"{ratio['mean']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if ratio["pairs"] >= 20 else None
            share = f"{100 * found['share_of_processor_time']:.2f} %"
            rows.append((model, what, _short(mask_us), mask_us["p90"], mask_us["p99"], share, steps))
    columns = ["model", "answers", "a mask, us", "p90", "p99", "of processor time", "steps with / without"]
    return table(columns, rows)


def slow_grammars(results: Sequence[Result]) -> str:
    """A row for each load, with the figures of the earlier commit before those of the later one."""
    loads = {"alone": "nothing", "ambiguous": "an answer in an ambiguous grammar"}
    loads |= {"schemas": "new schemas of 58 kB", "refused": "new schemas that are refused as too large"}
    figures = ("tok_s", "between_p50_ms", "between_p99_ms", "longest_gap_ms", "requests_s")
    rows: list[tuple[object, ...]] = []
    for result in results:
        for load, words in loads.items():
            both = [[result[when][f"{load}_{figure}"] for figure in figures] for when in ("before", "after")]
            # Only requests with schemas come one after the other and are counted.
            cells = [
                f"{_short(one)} / {_short(other)}" if other["most"] else None for one, other in zip(*both, strict=True)
            ]
            rows.append((words, *cells))
    return table(["beside", "tok/s", "between tokens p50, ms", "p99, ms", "longest, ms", "slow requests/s"], rows)


def _short(figure: float | dict[str, float]) -> str:
    return number(figure["median"] if isinstance(figure, dict) else figure)


# By the name of the marker on the page, which is that of the benchmark.
TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "limits": limits,
    "decode": decode,
    "prefill": prefill,
    "step": step,
    "growth": growth,
    "prefix": prefix,
    "speculation": speculation,
    "paired": paired,
    "quality": quality,
    "startup": startup,
    "memory": memory,
    "overload": overload,
    "arrivals": arrivals,
    "grammars": grammars,
    "slow_grammars": slow_grammars,
    "gpu": gpu,
    "gpu_check": gpu_check,
}


def fill(page: str, results: Sequence[Result]) -> str:
    """The page with its tables replaced. Raises KeyError for a marker without a table."""

    def replace(found: re.Match[str]) -> str:
        marker = found[1]
        folder, _, name = marker.rpartition("/")
        here = [one for one in results if one.get("folder", "") == folder]
        made = machine(here) if name == "machine" else TABLES[name]([one for one in here if one["benchmark"] == name])
        return f"<!-- {marker} -->\n{made}\n<!-- /{marker} -->"

    return re.sub(r"<!-- ([\w/]+) -->\n.*?<!-- /\1 -->", replace, page, flags=re.DOTALL)


def main(argv: Sequence[str]) -> None:
    parser = command_parser("report", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(argv)
    options.page.write_text(fill(options.page.read_text(), read_results(options.results)))
    print(options.page)
