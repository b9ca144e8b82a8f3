"""Code and documents use the field's terms instead of retired words. The list is tests/data/retired_words.txt."""

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "data" / "retired_words.txt"
CODE = (".py", ".cpp", ".hpp")
TEXT = (*CODE, ".sh", ".toml", ".yaml", ".md", ".html", ".js", ".css", ".env", "Makefile", "Dockerfile")
# The list itself and its page, the stories of the demo model, and the benchmarks' results.
NOT_READ = ("tests/data", "tests/test_vocabulary.py", "docs/renames.md", "scripts/demo", "demo", "benchmarks/results")
NOT_OURS = ("build", "dist", "node_modules")


@cache
def files() -> dict[str, str]:
    """The text of every file that people write, by its path in the repository."""
    found = {}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        name = "/".join(parts)
        is_ours = not any(part.startswith(".") or part in NOT_OURS or part.endswith(".egg-info") for part in parts)
        is_read = not any(name == other or name.startswith(other + "/") for other in NOT_READ)
        if is_ours and is_read and path.name.endswith(TEXT) and path.is_file():
            found[name] = path.read_text()
    return found


@cache
def retired(text: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """The identifiers and the words of the list."""
    names, words = [], []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        old, arrow, new = line.partition(" -> ")
        assert arrow and new, line
        if old.startswith("words "):
            words.append(old.removeprefix("words "))
        else:
            assert old.isidentifier(), f"{old} is no identifier; sentences have a line that begins with words"
            names.append(old)
    return frozenset(names), tuple(words)


def identifiers(text: str, where: str) -> Iterator[tuple[int, str]]:
    """Line and text of each identifier of a file's code, without comments and strings."""
    if where.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string
    elif where.endswith(CODE):
        for number, line in enumerate(text.splitlines(), 1):
            yield from ((number, name) for name in re.findall(r"\w+", line.partition("//")[0]))


def separated(text: str) -> str:
    """The text with spaces between the words of its identifiers."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text)


def uses(text: str, where: str, names: frozenset[str], words: tuple[str, ...]) -> list[str]:
    """Each use of a retired word as `file:line: word`. Words are found inside identifiers too: `num_seats`, `SeatOf`."""
    found = []
    if not names.isdisjoint(re.findall(r"\w+", text)):  # reading tokens takes many times as long
        found = [(number, name) for number, name in identifiers(text, where) if name in names]
    word = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b", re.IGNORECASE)
    if words and word.search(separated(text)):
        for number, line in enumerate(text.splitlines(), 1):
            found += ((number, one.lower()) for one in word.findall(separated(line)))
    return [f"{where}:{number}: {one}" for number, one in sorted(found)]


def test_retired_words_are_found_in_identifiers_and_sentences() -> None:
    names, words = retired("# a comment\nOld -> New\nwords seat -> bundle index\n")
    text = "Old = 1\nOlder = 2  # Old\nrank_seat = 'the Seat'\nclass SeatOf:\n    seating = 0\n"
    assert uses(text, "a.py", names, words) == ["a.py:1: Old", "a.py:3: seat", "a.py:3: seat", "a.py:4: seat"]
    assert uses("int Old; // Old\n", "a.hpp", names, words) == ["a.hpp:1: Old"]
    assert uses("`Old` and a seat\n", "a.md", names, words) == ["a.md:1: seat"]


@pytest.mark.parametrize("where", sorted(files()))
def test_no_file_uses_a_retired_word(where: str) -> None:
    names, words = retired(LIST.read_text())
    found = uses(files()[where], where, names, words)
    assert found == [], "\n".join(found)
