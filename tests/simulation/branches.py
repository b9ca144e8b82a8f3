"""Which branches of the product histories never take: of `if`, `while`, `for` and `except`, by the lines that follow one
another. Parts of an expression are not told apart."""

import ast
import dis
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2] / "deployments"
FILES: Final = (*sorted(ROOT.glob("fleet/*.py")), *sorted(ROOT.glob("links/*.py")), ROOT / "engine" / "supervisor.py")
LEFT: Final = 0  # in the place of a line, when a function returns


class Branches:
    """Traces while it is entered. `untaken` afterwards."""

    def __init__(self) -> None:
        self._arcs: dict[str, set[tuple[int, int]]] = {str(path): set() for path in FILES}

    def __enter__(self) -> "Branches":
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A function begins, or a coroutine goes on."""
        if (arcs := self._arcs.get(frame.f_code.co_filename)) is None:
            return None
        before = frame.f_lineno

        def follow(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal before
            if event == "line":
                arcs.add((before, frame.f_lineno))
                before = frame.f_lineno
            elif event == "return" and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_"):
                arcs.add((before, LEFT))  # else it waits, or raises
            return follow

        return follow

    def untaken(self) -> Iterator[str]:
        for path in FILES:
            text, arcs = path.read_text(), self._arcs[str(path)]
            for node in ast.walk(ast.parse(text)):
                if (what := _untaken(node, arcs)) is not None:
                    line = text.splitlines()[node.lineno - 1].strip()  # type: ignore[attr-defined]
                    yield f"{path.relative_to(ROOT.parent)}:{node.lineno}: {what}: {line}"  # type: ignore[attr-defined]


def _untaken(node: ast.AST, arcs: set[tuple[int, int]]) -> str | None:
    if isinstance(node, ast.ExceptHandler):
        return None if any(after == node.body[0].lineno for _, after in arcs) else "never caught"
    if not isinstance(node, ast.If | ast.While | ast.For):
        return None
    head = range(node.lineno, ((node.iter if isinstance(node, ast.For) else node.test).end_lineno or 0) + 1)
    follows = {after for before, after in arcs if before in head and after not in head}
    if not follows:
        return "never reached"
    if node.body[0].lineno not in follows:
        return "never true" if isinstance(node, ast.If) else "never entered"
    return "never false" if isinstance(node, ast.If) and len(follows) == 1 else None
