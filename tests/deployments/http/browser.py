"""Drives the pages in Chromium through Playwright, and finds what is wrong with what a page logs, asks for and shows."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from tests.support.waiting import wait_until

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass(slots=True)
class Seen:
    """console: kind and text of each message. faults: errors of scripts, blocked parts, and requests to other hosts."""

    console: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def errors(self, expected: str | None = None) -> list[str]:
        """All faults, and the console's errors without those that have the text `expected`."""
        logged = [text for kind, text in self.console if kind == "error" and (expected is None or expected not in text)]
        return self.faults + [f"console: {text}" for text in logged]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser, for a caller that has checked that Playwright and CHROMIUM are installed."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def watch(page: Any, url: str) -> Seen:
    """Collect what the page logs and does from now on. It may ask the server at `url` only."""
    seen = Seen()

    def note_request(request: Any) -> None:
        if not request.url.startswith((url, "data:", f"blob:{url}")):
            seen.faults.append(f"asks for {request.url}")

    page.on("pageerror", lambda error: seen.faults.append(f"error: {error}"))
    page.on("console", lambda message: seen.console.append((message.type, message.text)))
    page.on("request", note_request)
    return seen


def until(page: Any, condition: str) -> None:
    """Playwright's own wait_for_function evaluates a string inside the page, which the policy forbids."""
    wait_until(condition, lambda: bool(page.evaluate(condition)), pause_s=0.005)


def ask(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")
