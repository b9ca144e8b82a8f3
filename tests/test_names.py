"""Files and classes that pages, docstrings and comments name in back-ticks exist."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.rooms import PACKAGES

ROOT = Path(__file__).parents[1]
FILES = {
    path: f"/{path.relative_to(ROOT)}" for folder in (*PACKAGES, "scripts") for path in (ROOT / folder).rglob("*.*")
}
PAGES = [*(ROOT / "docs").glob("*.md"), *(page for page in ROOT.glob("*.md") if page.stem != "CHANGELOG")]
TEXTS = {path: path.read_text() for path in (*FILES, *PAGES) if path.suffix in (".py", ".hpp", ".cpp", ".md")}
OF_LIBRARIES = {"RequestRouter", "PreTrainedTokenizerFast", "TokenizerWrapper"}  # which no code here names


def named(pattern: str) -> Iterator[tuple[Path, str]]:
    """Each back-ticked text of that form, and the file that has it."""
    return ((path, name) for path, text in TEXTS.items() for name in re.findall(f"`({pattern})`", text))


def test_each_named_file_exists_and_a_page_names_one() -> None:
    for path, name in named(r"[\w./-]*\w\.(?:py|hpp|cpp|sh|env)"):
        found = [file for file in FILES.values() if file.endswith(f"/{name}")]
        assert len(found) == 1 or (found and path not in PAGES), f"{path}: `{name}` is {found}"


def test_each_named_class_exists() -> None:
    known = {*dir(builtins), *OF_LIBRARIES}
    for path, text in TEXTS.items():
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(text)):
                known.update(*(str(getattr(node, field, "")).split(".") for field in ("id", "attr", "name", "arg")))
        elif path not in PAGES:
            known.update(re.findall(r"\w+", re.sub("//.*", "", text)))
    camel = r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+(?:\.\w+)?|[A-Z]\w*[a-z]\.[a-z]\w*"
    assert {(str(path), name) for path, name in named(camel) if not set(name.split(".")) <= known} == set()
