"""Drives the pages in Chromium through Playwright, and finds what is wrong with what a page logs, asks for and shows."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from tests.support.waiting import wait_until

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# WCAG 2.2's level AA for text: this contrast with what is behind it, and 3 where it is large.
MIN_CONTRAST: Final = 4.5

# What is wider than the window or than an open dialog, and the contrast of each visible text: with a dialog open, of its texts
# only, because the rest is behind its backdrop. Colours may have any notation; a canvas gives their channels.
LAYOUT: Final = """width => {
  const wide = [], texts = [], root = document.scrollingElement, dialog = document.querySelector("dialog[open]");
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const widest = Math.max(root.scrollWidth, innerWidth);
  if (widest > width) wide.push(`the page: ${widest} of ${width}`);
  if (dialog?.scrollWidth > dialog?.clientWidth) wide.push(`${dialog.id}: ${dialog.scrollWidth} of ${dialog.clientWidth}`);
  const popovers = [...document.querySelectorAll("[popover]")].filter(each => each.matches(":popover-open"));
  for (const each of [dialog, ...popovers].filter(Boolean)) {
    const { left, right, top, bottom } = each.getBoundingClientRect();
    if (left < 0 || right > width || top < 0 || bottom > innerHeight) wide.push(`${each.id} is not in the window`);
  }

  const over = (colour, below) => {
    for (const fill of [`rgb(${below.join(" ")})`, colour]) { canvas.fillStyle = fill; canvas.fillRect(0, 0, 1, 1) }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const probe = root.appendChild(document.createElement("i"));
  probe.style.color = "Canvas";
  const paper = over(getComputedStyle(probe).color, [255, 255, 255]);
  probe.remove();
  const behind = node => node ? over(getComputedStyle(node).backgroundColor, behind(node.parentElement)) : paper;
  const linear = part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4;
  const luminance = channels => channels.reduce((sum, each, at) => sum + linear(each / 255) * [.2126, .7152, .0722][at], 0);
  for (const node of (dialog ?? document.body).querySelectorAll("*")) {
    const own = [...node.childNodes].filter(each => each.nodeType === 3).map(each => each.data).join("").trim();
    const text = own || node.value || node.placeholder;
    if (!text || node.disabled || !node.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (["SCRIPT", "STYLE", "PROGRESS"].includes(node.tagName) || ["range", "checkbox"].includes(node.type)) continue;
    const style = getComputedStyle(node, own || node.value ? null : "::placeholder"), back = behind(node);
    const [low, high] = [luminance(over(style.color, back)), luminance(back)].sort((one, other) => one - other);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.6 && style.fontWeight >= 700);
    texts.push({ text: String(text).slice(0, 40), contrast: (high + .05) / (low + .05), isLarge });
  }
  return { wide, texts };
}"""


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


def layout_faults(page: Any, width: int) -> tuple[list[str], float]:
    """What is too wide for a window of `width` pixels or has too little contrast, and the lowest contrast of any text."""
    found = page.evaluate(LAYOUT, width)
    faults = [f"too wide: {each}" for each in found["wide"]]
    for each in found["texts"]:
        if each["contrast"] < (3 if each["isLarge"] else MIN_CONTRAST):
            faults.append(f"contrast {each['contrast']:.2f}: {each['text']!r}")
    return faults, min((each["contrast"] for each in found["texts"]), default=21.0)
