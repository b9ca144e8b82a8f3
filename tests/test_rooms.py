"""Each folder's rule, as data: the packages that a room may import, and the libraries that it never loads."""

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("llama_core", "cluster", "deployments", "cli")
PACKAGES = (*PRODUCT, "benchmarks", "tests")

# A room is a module, or a folder without the modules and folders that are rooms of their own. The table names, for each room,
# the rooms that it may import beside itself.
BASE = (
    "llama_core",
    "llama_core.errors",
    "llama_core.host_memory",
    "llama_core.model_config",
    "llama_core.checkpoint",
)
LOG_LINES = "llama_core.log_lines"
JSON_PROCESS = "llama_core.json_process"
FORMATS = "llama_core.execution.weight_formats.registry"  # names of weight formats, without tensors
GRAMMARS = "llama_core.execution.grammars"
REPORT = "llama_core.execution.load_report"
PURE = (*BASE, LOG_LINES, FORMATS, REPORT, "llama_core.config", "llama_core.text", "llama_core.scheduling")
MODEL = (*PURE, "llama_core.checkpoint.loader", "llama_core.execution")
BACKENDS = ("llama_core.execution.reference", "llama_core.execution.fused", "llama_core.execution.native")
CHOICE = "llama_core.execution.backend_choice"
LOADING = "llama_core.execution.rank_loading"
CORE = (
    *MODEL, *BACKENDS, GRAMMARS, CHOICE, LOADING, "llama_core.execution.runner", "llama_core.execution.verify_files",
)  # fmt: skip
REPLICA = (
    "deployments",
    "deployments.args",
    "deployments.engine",
    "cluster.driver",
    "cluster.wire",
    "llama_core.results",
    *PURE,
)
ROOMS: Mapping[str, tuple[str, ...]] = {
    # Loaded by every process: no tensors.
    "llama_core": ("llama_core.generation",),  # `Llama`, imported on first use
    "llama_core.errors": (),
    "llama_core.host_memory": ("llama_core.errors",),
    "llama_core.sizes": (),
    "llama_core.host_cpu": (),
    "llama_core.log_lines": (),
    JSON_PROCESS: (),
    "llama_core.model_config": ("llama_core.errors",),
    "llama_core.checkpoint": ("llama_core.errors", "llama_core.host_memory", "llama_core.model_config"),
    FORMATS: (),
    REPORT: ("llama_core.checkpoint",),
    "llama_core.config": (*BASE, FORMATS),
    "llama_core.text": (*BASE, LOG_LINES, JSON_PROCESS),
    "llama_core.scheduling": (*BASE, LOG_LINES, "llama_core.config"),
    # Loaded by ranks.
    "llama_core.checkpoint.loader": BASE,
    "llama_core.checkpoint.mapped": BASE,
    "llama_core.checkpoint.meta_weights": (*BASE, "llama_core.checkpoint.mapped"),
    "llama_core.checkpoint.hf_weights": (*BASE, "llama_core.checkpoint.mapped"),
    "llama_core.checkpoint.gguf_weights": (*BASE, "llama_core.checkpoint.mapped"),
    "llama_core.checkpoint.meta": (*BASE, "llama_core.checkpoint.meta_weights"),  # imported when weights are opened
    "llama_core.checkpoint.hugging_face": (*BASE, "llama_core.checkpoint.hf_weights"),
    "llama_core.checkpoint.gguf": (*BASE, "llama_core.checkpoint.gguf_weights"),
    "llama_core.execution": (
        *BASE,
        FORMATS,
        REPORT,
        "llama_core.config",
        "llama_core.scheduling",
        "llama_core.checkpoint.loader",
    ),
    "llama_core.execution.reference": MODEL,
    "llama_core.execution.fused": (*MODEL, "llama_core.step_time"),
    "llama_core.execution.native": MODEL,
    "llama_core.execution.verify_files": MODEL,
    GRAMMARS: (*MODEL, JSON_PROCESS),
    CHOICE: (*MODEL, *BACKENDS),
    LOADING: (*MODEL, *BACKENDS, CHOICE, "llama_core.execution.verify_files"),
    "llama_core.execution.runner": (*MODEL, GRAMMARS, LOADING),
    # Users of the core in one process.
    "llama_core.results": PURE,
    "llama_core.convert": (*CORE, "llama_core.checkpoint.hf_weights", "llama_core.checkpoint.hugging_face"),
    "llama_core.reshard": (*MODEL, "llama_core.checkpoint.meta"),
    "llama_core.batch_loop": CORE,
    "llama_core.generation": (*CORE, "llama_core.batch_loop", "llama_core.results"),
    "llama_core.step_time": BASE,  # arithmetic over the architecture
    "llama_core.memory_estimate": CORE,  # plans a rank's memory as the runner does, before anything is loaded
    # cluster: the driver runs in the replica, rank in the rank actors, wire in both.
    "cluster": (),
    "cluster.deploy": (),
    "cluster.wire": PURE,
    "cluster.rank": ("cluster", "cluster.wire", *CORE),
    "cluster.driver": ("cluster", "cluster.wire", *PURE),
    # deployments: the replica's process, and the command on the user's machine.
    "deployments": (),
    "deployments.http.errors": ("deployments", *PURE),
    "deployments.http.request_headers": ("deployments", *PURE),
    "deployments.http.request_id": (
        "deployments",
        "deployments.http.errors",
        "deployments.http.request_headers",
        *PURE,
    ),
    "deployments.serve_headers": ("deployments", "deployments.http.errors", "deployments.http.request_id", *PURE),
    "deployments.api_keys": ("deployments", "deployments.http.errors", *PURE),
    "deployments.args": ("deployments", "deployments.http.errors", "deployments.api_keys", "llama_core.sizes", *PURE),
    "deployments.engine": tuple(room for room in REPLICA if room != "deployments.engine"),
    "deployments.tracing": REPLICA,
    "deployments.http": (
        *REPLICA,
        "llama_core.host_cpu",
        "deployments.tracing",
        "deployments.http.errors",
        "deployments.http.request_headers",
        "deployments.http.request_id",
        "deployments.serve_headers",
        "deployments.api_keys",
    ),
    "deployments.local": (*REPLICA, "deployments.http", "deployments.http.errors", "deployments.api_keys"),
    "deployments.handle_call": (*REPLICA, "deployments.tracing", "deployments.http"),
    "deployments.handle_api": (
        *REPLICA,
        "deployments.tracing",
        "deployments.handle_call",
        "deployments.http",
        "deployments.http.errors",
        "deployments.api_keys",
    ),
    "deployments.typed_api": (*REPLICA, "deployments.handle_api", "deployments.handle_call", "deployments.http"),
    "deployments.chat_answers": (*REPLICA, "deployments.http"),
    "deployments.chat_api": (
        *REPLICA,
        "deployments.chat_answers",
        "deployments.handle_call",
        "deployments.typed_api",
        "deployments.http",
    ),
    "deployments.replica_log": (
        *REPLICA,
        "deployments.api_keys",
        "deployments.handle_call",
        "deployments.http",
        "deployments.http.errors",
    ),
    "deployments.ingress": (
        *REPLICA,
        "deployments.tracing",
        "deployments.api_keys",
        "deployments.chat_api",
        "deployments.replica_log",
        "deployments.http",
        "deployments.http.errors",
        "deployments.local",
    ),
    "deployments.app": (*REPLICA, "deployments.ingress", "deployments.api_keys", "deployments.local"),
    "cli": (
        *REPLICA,
        "llama_core.sizes",
        "llama_core.host_cpu",
        "llama_core.memory_estimate",
        "llama_core.step_time",
        "llama_core.execution",  # `estimate` plans a GPU's memory as a rank does
        "llama_core.execution.native",  # `doctor` builds the library
        "llama_core.convert",
        "deployments.local",
        "deployments.app",
        "deployments.http",
    ),
    "deployments.up": ("deployments", "deployments.local", "cli"),
}
# Each module of these folders has a row of its own, because their positions in the order differ.
ONLY_THEIR_INIT = ("llama_core", "deployments")
# Libraries that a room never loads: not even through another library, when each of its modules is imported.
HTTP = ("fastapi", "starlette", "pydantic")
NEVER_LOADED: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama_core": (("llama_core",), ("ray", "msgspec", *HTTP)),
    "without tensors": (
        (
            "llama_core.errors",
            "llama_core.config",
            "llama_core.results",
            "llama_core.host_memory",
            "llama_core.host_cpu",
            "llama_core.text",
            "llama_core.scheduling",
            "llama_core.step_time",
            "llama_core.model_config",
            "llama_core.checkpoint.digest",
            "llama_core.checkpoint.files",
            "llama_core.checkpoint.manifest",
            "llama_core.checkpoint.hf_config",
            "llama_core.checkpoint.hf_files",
            "llama_core.checkpoint.hf_rope",
            "llama_core.checkpoint.hugging_face",
            "llama_core.checkpoint.json_fields",
            "llama_core.checkpoint.meta",
            "llama_core.checkpoint.registry",
            "llama_core.checkpoint.safetensors_file",
            "llama_core.checkpoint.source",
            "llama_core.checkpoint.weights",
            FORMATS,
            REPORT,
        ),
        ("torch", "fairscale", "ray"),
    ),
    "fast backends": (
        ("llama_core.execution.fused", "llama_core.execution.native", "llama_core.execution.runner"),
        ("fairscale", "llama_core.execution.reference.model"),
    ),
    "driver and wire": (("cluster.driver", "cluster.wire"), ("torch", "fairscale", "fastapi")),
    "replica": (("deployments", "cli"), ("torch", "fairscale")),
}
# Rules that one process checks, one after the other: importing takes seconds, and no rule bans what one before it may load.
PROCESSES = (("without tensors", "driver and wire", "replica"), ("fast backends", "llama_core"))
# Libraries that no file of a package imports directly.
NEVER_IMPORTED: Mapping[str, tuple[str, ...]] = {"llama_core": ("ray", "msgspec", *HTTP), "cluster": HTTP}
# Modules that only a machine with a GPU, or a command, can import.
NOT_IMPORTED_HERE = ("__main__", "kernels")


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
    assert room == module or room not in ONLY_THEIR_INIT, f"add {module} to ROOMS, with the rooms that it may import"
    return room


def circles(graph: Mapping[str, frozenset[str] | tuple[str, ...]]) -> list[list[str]]:
    """Strongly connected components of more than one node, by Tarjan's algorithm (SIAM J. Comput. 1 (2), 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], index[target])
        if lowest[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_tarjans_algorithm_finds_a_circle() -> None:
    assert circles({"a": ("b",), "b": ("c", "d"), "c": ("a",), "d": ()}) == [["a", "b", "c"]]


def test_no_circle_of_modules() -> None:
    # `llama_core` imports `Llama` on first use, for callers; no module of the package uses that import.
    graph = {name: targets - {"llama_core"} for name, targets in import_graph().items()}
    assert circles(graph) == []


def test_rooms_import_downward_only() -> None:
    """The table of allowed imports has no circle itself, so it is an order of the rooms."""
    unknown = {room: set(below) - set(ROOMS) for room, below in ROOMS.items()}
    assert not {room: names for room, names in unknown.items() if names}
    assert circles({room: tuple(set(below) - {"llama_core"}) for room, below in ROOMS.items()}) == []


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


def test_the_wheel_has_every_file_of_the_packages(tmp_path: Path) -> None:
    """A plain `pip install .` ships the chat page, the C++ sources and the deployment files, not only Python."""
    tree, out = tmp_path / "tree", tmp_path / "wheel"
    expected = set()
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and path.suffix not in (".pyc", ".so") and "__pycache__" not in path.parts:
                name = path.relative_to(ROOT)
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, tree / name)
                expected.add(str(name))
    for other in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / other, tree / other)
    out.mkdir()
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {Path(name).suffix for name in expected} >= {".py", ".html", ".cpp", ".hpp", ".yaml"}
    assert shipped == expected
