"""Takes a picture of every view of the pages, light and dark, on a desktop and on a phone, and checks each.

The server is a real one with API keys, and Chromium sends a key as its password. Answers stream from the model. A route in the
browser adds constraints to the page's requests, so that a model that knows neither Markdown nor JSON writes them too. The
exit status is 1 if a page logs an error, violates its policy, asks another host, is wider than the window, or has a text of
too little contrast. Needs Debian's `chromium`.

    python -m tests.programs.screenshots --keep /tmp/views
    python -m tests.programs.screenshots --keep /tmp/views --ckpt models/SmolLM2-135M-Instruct.Q4_1.gguf
    python -m tests.programs.screenshots --views conversation error --windows phone

report.json is what `--json` wrote of all views with the demo model.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.programs.screenshots.views import EXPECTED, KEY, STILL, VIEWS, Json, Visit
from tests.support.browser import CHROMIUM, Seen, chromium, layout_faults, watch
from tests.support.server import API_KEYS_VARIABLE, served

MAX_SEQ_LEN: Final = 4096
WINDOWS: Final[dict[str, Json]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 800}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 800}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}, "device_scale_factor": 2},
    "phone-dark": {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}, "device_scale_factor": 2},
}


@dataclass(frozen=True, slots=True)
class Picture:
    """One checked picture. console: `kind: text` of what the page logged. contrast: the lowest of a visible text."""

    view: str
    window: str
    size: str
    contrast: float
    console: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@contextmanager
def opened(browser: Any, url: str, window: str) -> Iterator[tuple[Visit, Seen]]:
    """The chat page in a fresh window, whose requests get the visit's fields."""
    credentials = {"username": "", "password": KEY}
    context = browser.new_context(**WINDOWS[window], http_credentials=credentials, has_touch=window.startswith("phone"))
    page = context.new_page()
    page.set_default_timeout(60_000)
    seen, visit = watch(page, url), Visit(page, url, window)

    def add_fields(route: Any) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | visit.fields))

    page.route("**/v1/chat/completions", add_fields)
    page.add_init_script(
        "addEventListener('securitypolicyviolation', event => console.error('policy: ' + event.violatedDirective))"
    )
    page.goto(url)
    try:
        yield visit, seen
    finally:
        context.close()


def take(browser: Any, url: str, view: str, window: str, folder: Path) -> Picture:
    """One view in a window of its own: its picture, and what is wrong with it."""
    with opened(browser, url, window) as (visit, seen):
        faults = []
        try:
            VIEWS[view](visit)
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}"[:400])
        visit.page.screenshot(path=folder / f"{view}-{window}.png", animations="disabled")
        if view in STILL and not visit.page.evaluate(STILL[view]):
            faults.append("the picture came too late")
        size = WINDOWS[window]["viewport"]
        wrong, contrast = layout_faults(visit.page, size["width"])
        faults += wrong + seen.errors(EXPECTED.get(view))
        console = [f"{kind}: {text}" for kind, text in seen.console]
    return Picture(view, window, f"{size['width']}x{size['height']}", round(contrast, 2), console, faults)


def key_faults(url: str) -> list[str]:
    """Without a key a page is refused so that a browser asks for one in a dialog of its own, which no picture shows."""
    faults = []
    for path in ("/", "/docs"):
        answer = httpx.get(url + path, trust_env=False)
        challenge = answer.headers.get("www-authenticate", "")
        if answer.status_code != 401 or not challenge.startswith("Basic "):
            faults.append(f"{path} without a key: {answer.status_code} {challenge}")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the pictures are kept; nowhere without it")
    parser.add_argument("--ckpt", default="demo", help="a folder, or a .gguf file")
    parser.add_argument("--views", nargs="+", default=list(VIEWS), choices=list(VIEWS))
    parser.add_argument("--windows", nargs="+", default=list(WINDOWS), choices=list(WINDOWS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    options = parser.parse_args()
    if CHROMIUM is None:
        parser.error("no Chromium is installed: apt-get install chromium")
    args: Json = {"ckpt_dir": options.ckpt, "max_seq_len": MAX_SEQ_LEN}
    if options.ckpt != "demo":
        args["model_id"] = Path(options.ckpt).stem
    pictures = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        served(args=args, env={API_KEYS_VARIABLE: KEY}) as server,
        chromium() as browser,
    ):
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        server.wait_ready()
        other_faults = key_faults(server.url)
        for view in options.views:
            for window in options.windows:
                picture = take(browser, server.url, view, window, folder)
                pictures.append(picture)
                print(
                    f"{view:14} {window:11} contrast {picture.contrast:5.2f}  {'; '.join(picture.faults)}", flush=True
                )
        version = browser.version
    for fault in other_faults:
        print(fault)
    num_faults = len(other_faults) + sum(len(picture.faults) for picture in pictures)
    print(f"{len(pictures)} pictures, {num_faults} faults")
    if options.json:
        report = {"checkpoint": Path(options.ckpt).name, "chromium": version, "faults": other_faults}
        options.json.write_text(json.dumps(report | {"pictures": [asdict(each) for each in pictures]}, indent=1) + "\n")
    sys.exit(bool(num_faults))


if __name__ == "__main__":
    main()
