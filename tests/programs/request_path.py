"""The files of this project that run for one streamed chat, in order, and how many functions and calls.

python -m tests.programs.request_path [--form build_app|fleet] [--calls|--links]
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from starlette.types import Message

from tests.simulation.history import Setting
from tests.simulation.operators import OperatedWorld as World
from tests.simulation.running import deterministic
from tests.support.asgi_client import AsgiCall
from tests.support.virtual_loop import VirtualLoop

ROOT: Final = Path(__file__).parents[2]
BODY: Final = {
    "messages": [{"role": "user", "content": "Tell me about the sea."}],
    "max_tokens": 8,
    "stream": True,
    "temperature": 0,
    "ignore_eos": True,
}


@dataclass
class RequestPath:
    """calls: of each function of the product. files: by name below the project's folder, in the order of their first call."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    files: dict[str, None] = field(default_factory=dict)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(ROOT)):
            return
        name = str(Path(code.co_filename).relative_to(ROOT))
        if not name.startswith(("tests/", ".venv/")) and "<" not in name:
            self.calls[code] += 1
            self.files.setdefault(name)


class QuickCall(AsgiCall):
    """Takes each message at once, as a socket with room does."""

    async def _send(self, message: Message) -> None:
        self.body += message.get("body", b"")


def request_path(form: str) -> RequestPath:
    """form: build_app or fleet, whose engine has the files of the front here. Fake ranks compute the tokens."""
    path, setting = RequestPath(), Setting(0, form, 1, (0,), max_batch_size=8, max_queue=8, step_s=0.01)
    loop = VirtualLoop()

    async def ask(world: World, *, is_noted: bool) -> None:
        headers = {"authorization": "Bearer one", "content-type": "application/json"}
        call = QuickCall(world.fronts[0].http_app, "/v1/chat/completions", BODY, headers)
        sys.setprofile(path.note if is_noted else None)
        await call.end()
        sys.setprofile(None)
        assert b"[DONE]" in call.body, call.body

    async def lived() -> None:
        world = World(setting)
        await world.run([])
        try:
            await ask(world, is_noted=False)
            await ask(world, is_noted=True)
        finally:
            await world.end()

    random.seed(0)
    with deterministic(0, loop):
        loop.run_until_complete(lived())
    return path


def links_to(files: Iterable[str]) -> str:
    """A numbered list in Markdown, with an item for each run of files of one folder."""
    runs = groupby(files, key=lambda file: str(Path(file).parent))
    items = [
        f"{number}. `{folder}`: " + ", ".join(f"[{Path(file).name}](../{file})" for file in run)
        for number, (folder, run) in enumerate(runs, 1)
    ]
    return "\n".join(items)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=("build_app", "fleet"), default="build_app")
    parser.add_argument("--links", action="store_true", help="write the list of docs/architecture.md")
    parser.add_argument("--calls", action="store_true", help="list the functions by their number of calls")
    args = parser.parse_args()
    path = request_path(args.form)
    if args.links:
        print(links_to(path.files))
        return
    for file in path.files:
        print(file, sum(1 for _ in (ROOT / file).open()))
    if args.calls:
        for code, count in path.calls.most_common():
            print(count, f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno}", code.co_qualname)
    print(f"{len(path.files)} files, {len(path.calls)} functions, {path.calls.total()} calls")


if __name__ == "__main__":
    main()
