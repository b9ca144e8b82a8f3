"""The claims of SECURITY.md that can be checked in the code and the shipped files."""

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PRODUCT = [
    path for package in ("llama_core", "cluster", "deployments") for path in sorted((ROOT / package).rglob("*.py"))
]
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Collectives of torch that pickle their objects.
OBJECT_COLLECTIVES = {f"{verb}_object{end}" for verb in ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
                      for end in ("", "_list")}  # fmt: skip
SHIPPED = [
    path
    for path in sorted(ROOT.rglob("*"))
    if path.suffix in (".yaml", ".yml", ".sh") or path.name.startswith(("Dockerfile", "docker-compose"))
    if not any(part.startswith(".") or part == "node_modules" for part in path.relative_to(ROOT).parts)
]
# The first releases without published vulnerabilities: see docs/faults.md.
FLOORS = {"torch": (2, 10), "sentencepiece": (0, 2, 1), "ray": (2, 56)}


def full_name(node: ast.expr) -> str:
    """The source of a called function. `ast.unparse` alone takes ten times as long."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{full_name(value)}.{name}"
    return ast.unparse(node)


def calls(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a file with the full name of the called function."""
    for node in nodes:
        if isinstance(node, ast.Call):
            yield full_name(node.func), node


def test_no_file_of_the_packages_unpickles_or_evaluates() -> None:
    for path in PRODUCT:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = {
            alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
        }
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not {name.split(".")[0] for name in imported} & UNPICKLERS, path
        for name, call in calls(nodes):
            assert name.rpartition(".")[2] not in OBJECT_COLLECTIVES, (path, name)
            assert name not in ("eval", "exec", "yaml.load", "yaml.unsafe_load"), (path, name)
            if name == "torch.load":
                options = {option.arg: ast.unparse(option.value) for option in call.keywords}
                assert options.get("weights_only") == "True", path


@pytest.mark.parametrize("name", FLOORS)
def test_libraries_are_newer_than_their_published_vulnerabilities(name: str) -> None:
    floor = FLOORS[name]
    stated = re.search(rf'"{name}(?:\[\w+\])?>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    pinned = re.search(rf"^{name}==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert stated is not None and pinned is not None
    for version in (stated[1], pinned[1], importlib.metadata.version(name).split("+")[0]):
        assert tuple(map(int, version.split("."))) >= floor, version


def test_shipped_files_start_ray_with_a_token_and_its_dashboard_on_loopback() -> None:
    deploy = ROOT / "cluster" / "deploy"
    assert re.search(r'^export RAY_AUTH_MODE="\$\{RAY_AUTH_MODE:-token\}"$', (deploy / "cluster.env").read_text(), re.M)
    assert re.search(r'^\. ".*/cluster\.env"$', (deploy / "start_node.sh").read_text(), re.M)
    code = {path: re.sub(r"#.*", "", path.read_text()) for path in SHIPPED}
    assert [path.name for path, text in code.items() if re.search(r"\bray start\b", text)] == ["start_node.sh"]
    started = [
        line for text in code.values() for line in re.findall(r"start_node\.sh\s+--.*", text) if "OPTIONS" not in line
    ]
    assert len(started) == 2, "the launcher's head and workers"
    assert all("--dashboard-host=127.0.0.1" in line for line in started if "--head" in line)


def test_kuberays_dashboard_asks_for_a_token() -> None:
    service, *_ = yaml.safe_load_all((ROOT / "cluster/deploy/rayservice.yaml").read_text())
    ray_cluster = service["spec"]["rayClusterConfig"]
    assert ray_cluster["authOptions"] == {"mode": "token"}
    assert "dashboard-host" not in ray_cluster["headGroupSpec"]["rayStartParams"]


def test_only_files_for_several_nodes_and_the_image_open_http_and_ask_for_keys() -> None:
    opened = [
        str(path.relative_to(ROOT))
        for path in SHIPPED
        if re.search(r"^[^#\n]*\b0\.0\.0\.0\b", path.read_text(), re.MULTILINE)
    ]
    image = "cluster/deploy/Dockerfile"
    assert opened == [image, "cluster/deploy/rayservice.yaml", "cluster/deploy/serve_cluster.yaml"]
    assert re.search(
        r"^# docker run .*-p 127\.0\.0\.1:.* LLAMA_API_KEYS=", (ROOT / opened.pop(0)).read_text(), re.MULTILINE
    )
    assert all(re.search(r"^\s+api_key_file: \S", (ROOT / path).read_text(), re.MULTILINE) for path in opened)
