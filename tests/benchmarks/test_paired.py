"""The paired runner: contenders' files, the whole command with a real server, and the end of programs that it starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.common import REPOSITORY, last_json
from benchmarks.harness.contenders import QUESTIONS, Contender, read_recipes, values_for
from benchmarks.harness.paired import OURS
from benchmarks.harness.programs import Program
from tests.support.scripted_engine import MODEL_ID
from tests.support.waiting import wait_until


def test_the_example_file_and_ours_describe_every_contender_of_the_page() -> None:
    recipes = read_recipes([OURS, REPOSITORY / "benchmarks" / "peers.example.toml"])
    assert recipes.contenders.keys() >= {"ours", "ours-http", "vllm", "llamacpp", "ray-serve-llm"}
    values = values_for(recipes, "llama-110m", "bfloat16", {"repeats": "1", "prompt": "1", "output": "1"})
    for question, name in (("decode", "llamacpp"), ("prefill", "vllm"), ("online", "ray-serve-llm")):
        assert Contender(recipes.contenders[name], question, values, 1.0).name == name


def test_a_command_and_a_server_are_compared_in_one_run_and_no_process_is_left(tmp_path: Path) -> None:
    said = dict.fromkeys(QUESTIONS["online"].figures, 2.0) | {"output_tok_s": 100}
    constant = tmp_path / "constant.py"
    constant.write_text(f"print({json.dumps(said)!r})\n")
    peers = tmp_path / "peers.toml"
    peers.write_text(
        f"""
[models.demo]
vocab_size = "200"

[contenders.constant]
online = ["{{python}}", "{constant}"]

[contenders.fake]
server = ["{{python}}", "-m", "tests.benchmarks.fake_server", "{{port}}", "{tmp_path}"]
served_model = "{MODEL_ID}"
ready = "/health"

[contenders.broken]
online = ["{{python}}", "-c", "raise SystemExit(3)"]
"""
    )
    load = ["--prompt", "8", "--output", "5", "--concurrency", "2", "--requests", "4"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", "paired", "--question", "online", "--peers", str(peers), *load),
            *("--contenders", "constant", "fake", "broken", "--rounds", "2", "--patience-s", "0"),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr  # one contender never answered
    result = last_json(done.stdout)
    assert result["contenders"]["constant"]["output_tok_s"]["median"] == 100
    assert result["contenders"]["fake"]["output_tok_s"]["median"] > 0
    assert result["ratios"]["fake"]["output_tok_s"]["ratio"]["count"] == 2
    assert [error.split(":")[0] for error in result["failed"]["broken"]] == ["round 1", "round 2"]
    assert "ttft_p50_ms (less is better)" in done.stdout
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in running


# The end of programs that a benchmark starts.


# Starts a child in a session of its own that ignores SIGTERM, as faulty programs do.
STUBBORN = """
import subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
print("started", flush=True)
time.sleep(60)
"""


def test_every_descendant_of_a_program_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.programs.PATIENCE_S", 0.5)
    program = Program([sys.executable, "-c", STUBBORN], tmp_path / "output")
    wait_until("the program has a child", lambda: program.said().strip() == "started")
    # A process that is just being started has no environment, and so no tag, for a moment.
    wait_until("both processes carry the tag", lambda: len(program.processes()) == 2)
    program.end()
    assert program.processes() == []
