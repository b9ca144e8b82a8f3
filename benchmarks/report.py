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


def cases(*figures: str) -> Callable[[Result], Rows]:
    """A row for each case of a result."""

    def rows(result: Result) -> Rows:
        for name, case in result["cases"].items():
            yield f"{result['model']}, {name}", *(case[figure] for figure in figures)

    return rows


def paired(result: Result) -> Rows:
    """A row for each contender beside the first, in process."""
    if result["question"] == "online":
        return
    first = result["first"]
    for other, figures in result["ratios"].items():
        for figure, one in figures.items():
            both = "/".join(_middle(result["contenders"][name][figure]) for name in (first, other))
            yield f"{result['model']} {result['dtype']}, {figure}: {first} / {other}", both, _ratio(one)


def online(result: Result) -> Rows:
    """A row for each contender beside the first, over HTTP."""
    if result["question"] != "online":
        return
    for other, found in result["ratios"].items():
        what = f"{result['model']} {result['dtype']}, {result['concurrency']}: {result['first']} / {other}"
        yield what, *(_ratio(found[figure]) if figure in found else None for figure in ONLINE)


def arrivals(result: Result) -> Rows:
    """A row for each load: the first contender's figures beside those of the last."""
    figures = ("ttft_p50_ms", "ttft_p99_ms", "per_token_p50_ms", "output_tok_s")
    for load, one in result["loads"].items():
        (first, ratios), *_ = one["ratios"].items()
        ours, theirs = one["contenders"][first], [*one["contenders"].values()][-1]
        values = (f"**{ratios[each]:.2f}** ({_middle(ours[each])}/{_middle(theirs[each])})" for each in figures)
        yield load, *values, ours["requests"]


def startup(result: Result) -> Rows:
    model = Path(result["args"].get("ckpt_dir", "demo")).name
    for how, case in result["how"].items():
        what = f"{model}, {'cold' if result['cold'] else 'warm'} page cache, {how}"
        yield what, case["seconds"], case["reached_s"].get("weights are loaded")


ONLINE = ("output_tok_s", "ttft_p50_ms", "ttft_p99_ms", "between_p50_ms", "between_p99_ms")
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


def _ratio(one: Any) -> str:
    ratio = one["ratio"]
    return f"**{ratio['median']:.2f}** ({ratio['least']:.2f}..{ratio['most']:.2f})"


def _middle(figure: Any) -> str:
    """A figure, or the median of a spread; text as it is."""
    return figure if isinstance(figure, str) else number(figure["median"] if isinstance(figure, dict) else figure)


# By the name of the marker on the page, which is that of the benchmark: the columns, and the rows of one result. `online` has
# the results of `paired` over HTTP.
TABLES: dict[str, tuple[Sequence[str], Callable[[Result], Rows]]] = {
    "decode": (
        ("model, weights", "tok/s", "step ms", "bytes a token", "GB/s", "of memory", "of as many bytes"),
        cases("decode_tok_s", "step_ms", "bytes_per_token", "read_gb_s", "share_of_memory", "share_of_same_size"),
    ),
    "prefill": (
        ("model, weights", "tok/s", "GFLOP/s", "matrix product", "share"),
        cases("prefill_tok_s", "gflop_s", "matmul_gflop_s", "share_of_matmul"),
    ),
    "paired": (("model, figure", "medians", "ratio (least..most)"), paired),
    "online": (("model, clients: contenders", "tok/s", "TTFT p50", "TTFT p99", "between p50", "between p99"), online),
    "arrivals": (("load", "TTFT p50, ms", "TTFT p99, ms", "time per token p50, ms", "tok/s", "requests"), arrivals),
    "startup": (("start", "s to the first good answer", "weights loaded after"), startup),
    "gpu": (("device, model", *GPU.values()), gpu),
}


def fill(page: str, results: Sequence[Result]) -> str:
    """The page with its tables replaced. Raises KeyError for a marker without a table."""

    def replace(found: re.Match[str]) -> str:
        marker = found[1]
        folder, _, name = marker.rpartition("/")
        here = [one for one in results if one.get("folder", "") == folder]
        columns, rows = TABLES[name]
        kind = "paired" if name == "online" else name
        made = table(columns, [[*map(_middle, row)] for one in here if one["benchmark"] == kind for row in rows(one)])
        return f"<!-- {marker} -->\n{made}\n<!-- /{marker} -->"

    return re.sub(r"<!-- ([\w/]+) -->\n.*?<!-- /\1 -->", replace, page, flags=re.DOTALL)


def main(argv: Sequence[str]) -> None:
    parser = command_parser("report", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(argv)
    options.page.write_text(fill(options.page.read_text(), read_results(options.results)))
    print(options.page)
