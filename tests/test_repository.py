"""Documents and shipped files agree with the code: arguments, routes, metrics, files, links."""

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.args import ServerArgs
from deployments.engine.interface import Engine
from deployments.engine.metric import Gauge, Histogram
from deployments.engine.metrics import Metrics
from deployments.http.app import build_http_app
from llama_core.errors import CheckpointError, ConfigError, LlamaError, TokenizerError
from llama_core.generation import Llama
from tests.support.scripted_engine import FakeEngine

ROOT = Path(__file__).parents[1]
RENAMES = ROOT / "docs" / "renames.md"  # has names that no longer exist
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if path != RENAMES)
DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *PAGES]


def written(default: object) -> str:
    """A default in YAML; empty for None."""
    return "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def test_the_configuration_page_names_every_argument_with_its_default() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    named = dict(re.findall(r"^\| `(\w+)` \| (?:`([^`]+)`|none) \|", page, re.MULTILINE))
    expected = {name: written(field.default) for name, field in ServerArgs.model_fields.items()}
    assert named == expected


def test_every_argument_of_build_and_every_metric_is_documented() -> None:
    differences = (ROOT / "docs" / "differences.md").read_text()
    keyword_only = [p.name for p in inspect.signature(Llama.build).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [name for name in keyword_only if f"`{name}`" not in differences] == []

    operations = (ROOT / "docs" / "operations.md").read_text()
    metrics = [name for name, value in vars(Metrics(in_ray=False)).items() if isinstance(value, Gauge | Histogram)]
    assert metrics
    assert [name for name in metrics if f"| `{name}` |" not in operations] == []


def test_the_http_page_names_every_route() -> None:
    engine: Engine = FakeEngine()
    routes = build_http_app(engine, Metrics(in_ray=False)).openapi()["paths"]
    page = (ROOT / "docs" / "http.md").read_text()
    assert [path for path in routes if not re.search(rf"`(GET|POST) {re.escape(path.split('/{')[0])}`", page)] == []


def error_codes(kind: type[LlamaError]) -> set[str]:
    return {kind.code}.union(*(error_codes(child) for child in kind.__subclasses__()))


def test_the_http_page_names_every_error_code_that_a_request_can_get() -> None:
    at_start = {error.code for error in (ConfigError, CheckpointError, TokenizerError)}
    page = (ROOT / "docs" / "http.md").read_text()
    assert [code for code in sorted(error_codes(LlamaError) - at_start) if f"`{code}`" not in page] == []


def test_the_development_pages_layout_names_every_directory() -> None:
    built = {"build", "dist", "node_modules"}
    found = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in built]
    wanted = [name for name in found if name[0] not in "._" and not name.endswith(".egg-info")]
    layout = (ROOT / "docs" / "development.md").read_text().split("## Layout")[1].split("\n## ")[0]
    assert [name for name in wanted if f"{name}/" not in layout] == []


def test_the_index_of_the_documentation_names_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    index = re.findall(r"^\| \[(\w+\.md)\]", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    assert sorted(index) == sorted(pages)


def test_the_list_of_renames_leads_to_files_that_exist() -> None:
    files = RENAMES.read_text().split("\n## Files\n")[1]
    moved = re.findall(r"^\| ([\w./]+\.\w+) \| ([\w./]+\.\w+) \|$", files, re.MULTILINE)
    assert len(moved) > 100
    assert [now for _, now in moved if not (ROOT / now).exists()] == []


def headings(path: Path) -> set[str]:
    """The anchors that a renderer makes of a page's headings."""
    lines = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_documents_link_to_headings_that_exist() -> None:
    for document in DOCUMENTS:
        anchors = re.findall(r"\]\(([^)#:]*)#([\w-]+)\)", document.read_text())
        wrong = [
            (page, name) for page, name in anchors if name not in headings(document.parent / page if page else document)
        ]
        assert wrong == [], document.name


def test_the_readme_is_short() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 110
    first_screen = "\n".join(readme.splitlines()[:25])
    assert "\n    make serve MODEL=smollm2\n" in first_screen
    assert [
        word for word in ("Ray Serve", "Llama 1 to 3.3", "GGUF", "OpenAI", "vLLM", "CPU", "GPU") if word not in readme
    ] == []


def lines_of_python(path: Path) -> int:
    """Without comments, docstrings and blank lines."""
    source = path.read_text()
    others = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] not in others:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def test_the_readme_counts_the_lines_of_python() -> None:
    found = re.search(r"about ([\d,]+) lines of Python", (ROOT / "README.md").read_text())
    assert found
    rooms = ("llama_core", "cluster", "deployments", "cli")
    counted = sum(lines_of_python(path) for room in rooms for path in (ROOT / room).rglob("*.py"))
    assert abs(int(found[1].replace(",", "")) - counted) < 1500


def test_documents_refer_to_files_and_targets_that_exist() -> None:
    found = re.findall(r"^([\w -]+):(?!.*=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for targets in found for target in targets.split()}
    for document in DOCUMENTS:
        text = document.read_text()
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
        assert [link for link in links if not (document.parent / link).exists()] == [], document.name
        assert set(re.findall(r"`make ([\w-]+)|^ *make ([\w-]+)", text, re.MULTILINE)) <= {
            (target, "") for target in targets
        } | {("", target) for target in targets}, document.name
        paths = re.findall(
            r"\b(?<!tests/)((?:llama_core|cluster|deployments|examples|benchmarks|scripts|docs)/[\w./]*\w)", text
        )
        assert [path for path in paths if not (ROOT / path).exists()] == [], document.name


def test_documents_name_source_files_that_exist() -> None:
    folders = ("llama_core", "cluster", "deployments", "cli", "benchmarks", "tests", "scripts", "examples")
    names = {path.name for folder in folders for path in (ROOT / folder).rglob("*")}
    for document in DOCUMENTS:
        named = re.findall(r"`(\w+\.(?:py|hpp|cpp))`", document.read_text())
        assert [name for name in named if name not in names] == [], document.name


def fault_numbers(page: Path, pattern: str) -> list[str]:
    return re.findall(pattern, page.read_text(), re.MULTILINE)


def test_every_fault_has_a_number_an_outcome_and_a_list_of_tests() -> None:
    faults = fault_numbers(ROOT / "docs" / "faults.md", r"^\| (A?\d+) \|")
    numbers = [int(number) for number in faults if number.isdigit()]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 59
    assert [number for number in faults if not number.isdigit()] == [f"A{number}" for number in range(1, 8)]
    assert fault_numbers(ROOT / "docs" / "fault_tests.md", r"^## (A?\d+)$") == faults


def test_the_page_of_fault_tests_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "fault_tests.md").read_text()
    named: dict[str, set[str]] = {}
    for section in text.split("\n## ")[1:]:
        shown = re.findall(r"^- `(tests/[\w/]+\.py)::(test_\w+)`", section, re.MULTILINE)
        assert shown, f"no test shows fault {section.splitlines()[0]}"
        assert section.count("\n- ") == len(shown), section.splitlines()[0]
        for path, name in shown:
            named.setdefault(path, set()).add(name)
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for path, names in named.items():
        found = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, functions)}
        assert names - found == set(), path


def test_no_cell_of_a_table_is_longer_than_200_characters() -> None:
    for document in DOCUMENTS:
        rows = re.findall(r"^\| (.*) \|$", document.read_text(), re.MULTILINE)
        long = [cell[:60] for row in rows for cell in row.split(" | ") if len(cell) > 200]
        assert long == [], document.name


def test_serve_config_is_one_that_serve_and_the_server_accept() -> None:
    config = ServeDeploySchema(**yaml.safe_load((ROOT / "serve_config.yaml").read_text()))
    (application,) = config.applications
    assert (application.name, application.import_path) == ("llama", "deployments.app:build_app")
    assert config.http_options.host == "127.0.0.1"
    args = ServerArgs(**application.args)
    assert args.checkpoint.is_dir()
    assert args.tokenizer.is_file()


def test_the_licence_file_matches_the_packages_metadata() -> None:
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence
    assert "The llama-on-ray authors" in licence
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()


def test_the_in_process_example_runs() -> None:
    command = [sys.executable, str(ROOT / "examples" / "in_process.py"), "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "assistant: " in done.stdout
