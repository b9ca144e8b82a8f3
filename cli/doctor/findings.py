"""The result of a check, and the table of all results."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """FAIL: the server cannot start, or not safely. WARN: it starts, with less than it could have. SKIP: not checked."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """check: what was looked at. need, have: for people. remedy: what to do, empty where nothing is to be done."""

    check: str
    status: Status
    need: str
    have: str
    remedy: str = ""


def ok(check: str, need: str, have: str) -> Finding:
    return Finding(check, Status.OK, need, have)


def fail(check: str, need: str, have: str, remedy: str) -> Finding:
    return Finding(check, Status.FAIL, need, have, remedy)


def warn(check: str, need: str, have: str, remedy: str) -> Finding:
    return Finding(check, Status.WARN, need, have, remedy)


def skip(check: str, need: str, reason: str) -> Finding:
    return Finding(check, Status.SKIP, need, reason)


def judge(check: str, need: str, have: str, remedy: str, *, good: bool) -> Finding:
    """OK, or FAIL with the remedy."""
    return ok(check, need, have) if good else fail(check, need, have, remedy)


def exit_status(findings: Sequence[Finding]) -> int:
    return int(any(finding.status is Status.FAIL for finding in findings))


def as_data(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]


_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIP: "dim"}


def show(findings: Sequence[Finding]) -> None:
    """Print the table, then the remedy of each finding that has one, then the count."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "need", "have"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        status = Text(finding.status.value, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.check), Text(finding.need), Text(finding.have))
    console.print(table)
    for finding in findings:
        if finding.remedy:
            console.print(Text.assemble((f"\n{finding.check}: ", _STYLES[finding.status]), finding.remedy))
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    console.print(f"\n{counts[Status.FAIL]} failed, {counts[Status.WARN]} warnings, {counts[Status.OK]} passed.")
