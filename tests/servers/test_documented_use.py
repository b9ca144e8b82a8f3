"""What users read works when pasted: the banner, the programs of the documents, the examples, and the metrics' names."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support import http
from tests.support.programs import REPOSITORY, output_of
from tests.support.server import WITH_TOKEN, Server, address_of, openai_client
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)


def test_the_commands_of_the_banner_work_when_pasted(demo: Server) -> None:
    wait_until("the banner is printed", lambda: "is ready at" in demo.output())
    text = demo.output()
    assert (
        f"is ready at {demo.url}" in text
        and "ranks    2: each on cpu" in text
        and f"bind     127.0.0.1:{demo.port}" in text
    )
    assert "auth     off" in text
    lines = [line.strip() for line in text.splitlines()]
    curl = next(line for line in lines if line.startswith("curl "))
    assert "demo model" in json.loads(output_of(shlex.split(curl)))["choices"][0]["message"]["content"]
    python = next(line for line in lines if " -c 'import openai" in line)
    assert "demo model" in output_of(shlex.split(python))


def test_the_terminal_shows_one_line_a_phase_and_the_banner(demo: Server) -> None:
    wait_until("the banner is printed", lambda: "Who are you?" in demo.terminal.read_text())
    before, _, after = demo.terminal.read_text().partition("Llama on Ray is ready")
    lines = [line for line in before.splitlines() if line.strip()]
    phases = [line for line in lines if re.match(r" +[\d.]+ s  ", line)]
    # On a busy machine a rank may warn that no core is free, an event as after the banner, and Ray may start at a second try.
    event = r"  \d\d:\d\d:\d\d (WARNING|ERROR) (rank \d|replica|Serve): |Ray has not started within"
    events = [line for line in lines if re.match(event, line)]
    assert 4 <= len(phases) <= 8 and len(phases) + len(events) == len(lines), before
    (log,) = re.findall(r"log +(\S+\.log)", after)
    logged = Path(log).read_text()
    assert "Adding 1 replica" in logged and "HAProxy started" in logged and "Llama on Ray is ready" in logged


def test_the_programs_in_the_documents_run(demo: Server) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    pages = readme + (REPOSITORY / "docs" / "clients.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        # The server of these tests has the demo model.
        here = block.replace("http://127.0.0.1:8000", demo.url).replace("smollm2-135m-instruct", "llama-demo")
        # Other clusters may run, and "auto" would find the youngest.
        here = here.replace('ray.init("auto")', f'ray.init("{address_of(demo)}", log_to_driver=False)')
        assert output_of([sys.executable, "-c", here], WITH_TOKEN).strip()
    (curl,) = re.findall(r"^    (curl .*?\n.*?)$", readme, re.MULTILINE)
    answer = output_of(shlex.split(curl.replace("\\\n", " ").replace("http://127.0.0.1:8000", demo.url)))
    assert json.loads(answer)["choices"][0]["message"]["content"].strip()


@pytest.mark.parametrize("example", ["chat_openai.py", "completions_curl.sh", "resume_stream.py"])
def test_the_examples_run(demo: Server, example: str) -> None:
    path = REPOSITORY / "examples" / example
    command = [sys.executable, str(path)] if example.endswith(".py") else ["bash", str(path)]
    assert output_of([*command, "--base-url", demo.url]).strip()


@pytest.mark.full
def test_an_application_composes_with_the_model(demo: Server) -> None:
    output = output_of([sys.executable, "examples/compose_app.py", "--address", address_of(demo)], WITH_TOKEN, 100)
    assert re.search(r"'legs': \d.*'mood': '(happy|sad)'", output), output
    assert re.search(r"'legs': \[\d+.*'answer': ", output), output


def test_the_handle_example_runs(demo: Server) -> None:
    example = str(REPOSITORY / "examples" / "handle_from_ray_app.py")
    assert output_of([sys.executable, example, "--address", address_of(demo)], WITH_TOKEN).strip()


def test_ray_metrics_have_the_documented_names(plain: Server) -> None:
    openai_client(plain).completions.create(model="golden", prompt="hi", max_tokens=5, temperature=0)
    text = http.get(f"{plain.url}/metrics").text
    for name in (
        "tokens_generated_per_second", "prefill_time_ms", "time_per_decoding_step_ms", "gpu_memory_used_bytes",
        "cuda_oom_errors_count", "invalid_dialog_assertions_count",
    ):  # fmt: skip
        assert f"# HELP {name} " in text
    assert "time_per_decoding_step_ms_count 0.0" not in text
