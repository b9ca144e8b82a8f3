"""Documents and shipped files agree with the code: arguments, routes, metrics, files, links."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.args import ServerArgs
from deployments.fleet.scaling import gauges
from deployments.http.app import build_http_app
from deployments.observe.metric import Gauge, Histogram
from deployments.observe.metrics import Metrics
from llama_core.errors import CheckpointError, ConfigError, LlamaError, TokenizerError
from llama_core.generation import Llama
from tests.conftest import GROUPS, MARKS
from tests.support.scripted_engine import FakeEngine

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def written(default: object) -> str:
    """A default in YAML; empty for None."""
    return "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def test_the_configuration_page_names_every_argument_with_its_default() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    named = dict(re.findall(r"^\| `(\w+)` \| (?:`([^`]+)`|none) \|", page, re.MULTILINE))
    expected = {name: written(field.default) for name, field in ServerArgs.model_fields.items()}
    assert named == expected


def test_every_argument_of_build_and_every_metric_is_documented() -> None:
    comparison = (ROOT / "docs" / "comparison.md").read_text()
    keyword_only = [p.name for p in inspect.signature(Llama.build).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [name for name in keyword_only if f"`{name}`" not in comparison] == []

    operations = (ROOT / "docs" / "operations.md").read_text()
    metrics = [each.name for each in vars(Metrics(in_ray=False)).values() if isinstance(each, Gauge | Histogram)]
    metrics += gauges()
    assert [name for name in metrics if f"`{name}`" not in operations] == []


def test_the_http_page_names_every_route() -> None:
    routes = build_http_app(FakeEngine(), Metrics(in_ray=False)).openapi()["paths"]
    page = (ROOT / "docs" / "http.md").read_text()
    assert [path for path in routes if not re.search(rf"`(GET|POST) {re.escape(path.split('/{')[0])}`", page)] == []


def error_codes(kind: type[LlamaError]) -> set[str]:
    return {kind.code}.union(*(error_codes(child) for child in kind.__subclasses__()))


def test_the_http_page_names_every_error_code_that_a_request_can_get() -> None:
    at_start = {error.code for error in (ConfigError, CheckpointError, TokenizerError)}
    page = (ROOT / "docs" / "http.md").read_text()
    assert [code for code in sorted(error_codes(LlamaError) - at_start) if f"`{code}`" not in page] == []


def test_faults_are_numbered_without_gaps() -> None:
    numbers = re.findall(r"^\| (A?\d+) \|", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    faults, advisories = ([number for number in numbers if number.startswith("A") == kind] for kind in (False, True))
    assert faults == [str(i + 1) for i in range(len(faults))] and faults
    assert advisories == [f"A{i + 1}" for i in range(len(advisories))]


def test_the_index_of_the_documentation_names_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    index = re.findall(r"^\| \[(\w+\.md)\]", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    assert sorted(index) == sorted(pages)


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


def test_the_groups_of_tests_name_files_that_exist() -> None:
    assert [start for start in (*MARKS, *GROUPS) if not (ROOT / "tests" / start).exists()] == []


def test_serve_config_is_one_that_serve_and_the_server_accept() -> None:
    config = ServeDeploySchema(**yaml.safe_load((ROOT / "serve_config.yaml").read_text()))
    (application,) = config.applications
    assert (application.name, application.import_path) == ("llama", "deployments.app:build_app")
    assert config.http_options.host == "127.0.0.1"
    args = ServerArgs(**application.args)
    assert args.checkpoint.is_dir()
    assert args.tokenizer.is_file()


def test_the_in_process_example_runs() -> None:
    command = [sys.executable, str(ROOT / "examples" / "in_process.py"), "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "assistant: " in done.stdout
