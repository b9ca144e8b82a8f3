"""Each module imports and loads only what the table of its folder (`tests/support/rooms.py`) allows."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.rooms import (
    NEVER_IMPORTED,
    NEVER_LOADED,
    NOT_IMPORTED_HERE,
    OF_TESTS,
    PACKAGES,
    PROCESSES,
    PRODUCT,
    ROOMS,
)

ROOT = Path(__file__).parents[1]


@cache
def modules() -> dict[str, Path]:
    """Every module of the repository's packages, by its full name; a package by the name of its folder."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Full names that a file imports anywhere, in a function and under TYPE_CHECKING too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(names)


@cache
def import_graph() -> dict[str, frozenset[str]]:
    """Each module with the modules of this repository that it imports."""
    graph: dict[str, frozenset[str]] = {}
    for name, path in modules().items():
        targets = set()
        for target in imported_names(path):
            while target and target not in modules():
                target = target.rpartition(".")[0]
            targets.add(target)
        graph[name] = frozenset(targets - {"", name})
    return graph


def room_of(module: str) -> str:
    """The row of ROOMS that holds a module: the module itself, or the nearest folder above it that has a row."""
    room = module
    while room not in ROOMS:
        room = room.rpartition(".")[0]
        assert room, f"{module} is in no room"
    return room


def test_no_circle_of_modules() -> None:
    # `llama_core` imports `Llama` on first use, for callers; no module of the package uses that import.
    graph = {name: targets - {"llama_core"} for name, targets in import_graph().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_rooms_import_downward_only() -> None:
    """The table of allowed imports has no circle itself, so it is an order of the rooms."""
    unknown = {room: set(below) - set(ROOMS) for room, below in ROOMS.items()}
    assert not {room: names for room, names in unknown.items() if names}
    TopologicalSorter({room: set(below) - {"llama_core"} for room, below in ROOMS.items()}).prepare()


def test_every_module_imports_only_rooms_that_its_own_room_may() -> None:
    wrong = []
    for module, targets in import_graph().items():
        if module.partition(".")[0] not in PRODUCT:
            continue
        room = room_of(module)
        for target in sorted(targets):
            if target.partition(".")[0] not in PRODUCT or room_of(target) not in (room, *ROOMS[room]):
                wrong.append(f"{module} imports {target}")
    assert wrong == [], "\n".join(wrong)


def test_benchmarks_import_nothing_of_tests_but_the_simulated_fleet() -> None:
    graph = import_graph()
    own = {target for module in graph if module.startswith("benchmarks.") for target in graph[module]}
    assert {target for target in own if target.startswith("tests.")} == set(OF_TESTS)


def test_no_module_of_the_replica_imports_a_module_of_cluster_rank() -> None:
    found = {
        module
        for module, targets in import_graph().items()
        if module.startswith(("cluster.driver", "deployments", "cli"))
        and any(t.startswith("cluster.rank") for t in targets)
    }
    assert found == set(), "the replica's process must not import cluster/rank"


@pytest.mark.parametrize("package", NEVER_IMPORTED)
def test_no_file_of_the_package_imports_these_libraries(package: str) -> None:
    banned = set(NEVER_IMPORTED[package])
    for module, path in modules().items():
        if module.partition(".")[0] == package:
            assert {name.partition(".")[0] for name in imported_names(path)} & banned == set(), module


def modules_under(rule: str) -> list[str]:
    rooms, _ = NEVER_LOADED[rule]
    return [
        module
        for module, path in modules().items()
        if module in rooms or module.startswith(tuple(f"{room}." for room in rooms))
        if path.stem not in NOT_IMPORTED_HERE
    ]


def test_every_rule_is_checked_in_one_process() -> None:
    assert sorted(rule for rules in PROCESSES for rule in rules) == sorted(NEVER_LOADED)
    assert all(map(modules_under, NEVER_LOADED))


@pytest.mark.parametrize("rules", PROCESSES, ids=", ".join)
def test_no_module_of_the_room_loads_these_libraries(rules: tuple[str, ...]) -> None:
    """Each module is imported in one fresh process; the first one that brings a banned library is named."""
    stages = [(modules_under(rule), NEVER_LOADED[rule][1]) for rule in rules]
    code = (
        f"import importlib, sys\nfor names, banned in {stages!r}:\n    for name in names:\n"
        "        importlib.import_module(name)\n        found = [other for other in banned if other in sys.modules]\n"
        "        if found:\n            sys.exit(f'{name} loads {found}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == ""
