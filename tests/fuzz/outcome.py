"""The result of one part of the fuzz command: the number of cases, their outcomes, and the findings."""

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MOST_FINDINGS = 20  # findings of one part that are kept; all are counted
_TELL_EVERY_S = 15.0  # cases between two progress lines on standard error


@dataclass
class Outcome:
    """`counts`: cases by outcome. A finding is a text that says how to reproduce it."""

    part: str
    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    num_findings: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._told = self._began

    def case(self, how_it_ended: str) -> None:
        self.cases += 1
        self.counts[how_it_ended] += 1
        if self.cases % 100 == 0 and time.monotonic() - self._told > _TELL_EVERY_S:
            self._told = time.monotonic()
            seconds = self._told - self._began
            print(f"{self.part}: {self.cases} cases, {self.num_findings} findings, {seconds:.0f} s", file=sys.stderr)

    def found(self, text: str) -> None:
        self.num_findings += 1
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(text[:2000])

    def report(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._began
        return {
            "cases": self.cases,
            "seconds": round(seconds, 1),
            "cases_per_second": round(self.cases / max(seconds, 1e-9)),
            "ended": dict(sorted(self.counts.items())),
            "findings": self.num_findings,
            "examples": self.findings,
        } | self.extra
