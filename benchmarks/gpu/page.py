"""A run of `python -m benchmarks gpu` as a Markdown page: a table for each section, and every reason why one is missing."""

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.plan import SECTIONS
from benchmarks.gpu.recorder import shown
from benchmarks.harness.common import Spread
from benchmarks.report.markdown import table


def page(result: Mapping[str, Any]) -> str:
    """Of the result that `python -m benchmarks gpu` prints."""
    settings, versions = result["settings"], result["versions"]
    shape = f"{settings['shape']}, {settings['dtype']}, random weights"
    lines = [f"# {result['device']}: {shape}", ""]
    if settings["device"] != "cuda":
        lines += ["**Not a GPU: this page shows that the program runs.**", ""]
    lines += [
        f"Measured {result['date']} at commit {result['machine']['commit']}, CUDA {result['cuda']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". `{result['command']}` repeats it.",
        "",
    ]
    titles = {section.name: section.title for section in SECTIONS}
    for name, state in result["sections"].items():
        lines += [f"## {titles[name]}", ""]
        reason = f": {state['reason']}" if state["reason"] else ""
        if state["status"] != "done" or reason:
            lines += [f"{state['status'].capitalize()}{reason}.", ""]
        if state["figures"]:
            lines += [section_table(state["figures"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def section_table(figures: Mapping[str, Any]) -> str:
    """Figures with the same parts are rows of one table; single figures have a table of two columns."""
    single = [(name, shown(value)) for name, value in figures.items() if not _has_parts(value)]
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name, value in figures.items():
        if _has_parts(value):
            groups.setdefault(tuple(value), []).append((name, *map(shown, value.values())))
    tables = [table(["figure", *columns], rows) for columns, rows in groups.items()]
    return "\n\n".join([table(["figure", "value"], single)] * bool(single) + tables)


def _has_parts(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() != Spread.__dataclass_fields__.keys()
