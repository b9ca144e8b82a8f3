"""A fault of the fused backend, and the tests that must notice it."""

from typing import NamedTuple

FUSED = "llama_core/execution/fused"
TESTS = "tests/llama_core/execution"


class Mutant(NamedTuple):
    """file: from the folder FUSED, without its suffix. tests: a file, an expression of its tests' names, and further options of
    pytest."""

    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
