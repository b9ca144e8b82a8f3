"""The paired runner: turns, ratios of rounds and contenders' files, and the whole command with a real server."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.common import REPOSITORY, as_json, last_json
from benchmarks.harness.contenders import QUESTIONS, BadFile, Contender, read_recipes, values_for
from benchmarks.harness.paired import OURS, figure_of, main, ratios, rows_of, summary, take_turns
from tests.support.scripted_engine import MODEL_ID

DECODE = QUESTIONS["decode"].figures


class Fake:
    """A contender with a given figure in each turn; an exception among them is raised."""

    def __init__(self, name: str, figures: list[float | Exception], log: list[str]) -> None:
        self.name = name
        self._figures = iter(figures)
        self._log = log

    def ask(self, seed: int) -> dict[str, Any]:
        self._log.append(self.name)
        figure = next(self._figures)
        if isinstance(figure, Exception):
            raise figure
        return {"cases": {"bfloat16": {"decode_tok_s": {"median": figure}}}}


def test_the_order_of_contenders_is_reversed_every_other_round() -> None:
    log: list[str] = []
    contenders = [Fake("a", [1.0, 2.0, 3.0], log), Fake("b", [2.0, 2.0, 2.0], log)]
    records = take_turns(contenders, DECODE, 3, lambda: log.append("quiet"))
    assert [who for who in log if who != "quiet"] == ["a", "b", "b", "a", "a", "b"]
    assert log.count("quiet") == 6
    assert [turn["decode_tok_s"] for turn in records["a"].turns.values()] == [1.0, 2.0, 3.0]
    assert ratios(records["a"], records["b"], "decode_tok_s") == [0.5, 1.0, 1.5]
    (compared,) = summary(records, DECODE)["ratios"].values()
    assert compared["decode_tok_s"]["interval"]["mean"] == 1.0 and not compared["decode_tok_s"]["lower_is_better"]


def test_a_failed_turn_is_left_out_of_its_round_only() -> None:
    contenders = [Fake("a", [1.0, 1.0], []), Fake("b", [ValueError("it broke"), 4.0], [])]
    found = summary(take_turns(contenders, DECODE, 2, lambda: None), DECODE)
    assert found["failed"] == {"b": ["round 1: it broke"]}
    ratio = found["ratios"]["b"]["decode_tok_s"]
    assert (ratio["ratio"].median, ratio["ratio"].count, ratio["interval"]) == (0.25, 1, None)
    (row,) = rows_of(as_json(found))
    assert row == ("decode_tok_s", "a 1 ±0%", "b 4", "**0.25**", "0.25 .. 0.25", None)


def test_a_figure_is_found_at_the_top_or_in_the_only_case() -> None:
    assert figure_of({"x": 2}, "x") == 2.0
    assert figure_of({"x": {"median": 3.5, "low": 1}}, "x") == 3.5
    assert figure_of({"cases": {"8": {"x": 4}}}, "x") == 4.0
    for result in ({}, {"cases": {"1": {"x": 4}, "8": {"x": 5}}}, {"x": "fast"}):
        with pytest.raises(ValueError, match="no figure x"):
            figure_of(result, "x")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[nobody]\n", "unknown table nobody"),
        ("[contenders.a]\ndecodes = []\n", "contenders.a: unknown field decodes"),
        ("[contenders.a]\ndecode = 'a b'\n", "list of words"),
        ("[contenders.a\n", "line 1"),
    ],
)
def test_an_error_in_a_contenders_file_is_named_with_its_place(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "peers.toml"
    path.write_text(text)
    with pytest.raises(BadFile, match=error):
        read_recipes([path])


def test_placeholders_are_filled_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "peers.toml"
    say = "import json, os, sys; print(json.dumps({{'said': [*sys.argv[1:], os.environ['WHERE']]}}))"
    path.write_text(
        '[models.m]\nhf = "/ckpt/{model}"\ngguf = {bfloat16 = "b.gguf", int8 = "q8.gguf"}\n'
        f'[contenders.a]\ndecode = ["{{python}}", "-c", "{say}", "{{hf}}", "{{gguf}}", "{{dtype}}", "{{quantization}}"]\n'
        'prefill = ["{nothing}"]\nenv = {WHERE = "{hf}"}\n'
    )
    recipes = read_recipes([OURS, path])
    assert {"ours", "ours-http", "a"} <= recipes.contenders.keys()
    values = values_for(recipes, "m", "int8", {"repeats": "3"})
    said = ["/ckpt/m", "q8.gguf", "bfloat16", "int8", "/ckpt/m"]
    assert Contender(recipes.contenders["a"], "decode", values, 60.0).ask(1) == {"said": said}
    with pytest.raises(BadFile, match="'nothing'"):
        Contender(recipes.contenders["a"], "prefill", values, 1.0).ask(1)
    with pytest.raises(BadFile, match="neither a command for online"):
        Contender(recipes.contenders["a"], "online", values, 1.0)


def test_an_old_checkout_runs_its_own_code_by_its_own_interpreter(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "__main__.py").write_text(
        "import json, os, sys; print(json.dumps({'by': os.environ.get('BY')}))"
    )
    recipe = replace(read_recipes([OURS]).contenders["ours"], name="old", checkout=tmp_path)
    values = values_for(read_recipes([OURS]), "demo", "float32", {"prompt": "1", "output": "1", "repeats": "1"})
    assert Contender(recipe, "decode", values, 60.0).ask(1) == {"by": None}
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nBY=own exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert Contender(recipe, "decode", values, 60.0).ask(1) == {"by": "own"}


def test_the_example_file_and_ours_describe_every_contender_of_the_page() -> None:
    recipes = read_recipes([OURS, REPOSITORY / "benchmarks" / "peers.example.toml"])
    assert recipes.contenders.keys() >= {"ours", "ours-http", "vllm", "llamacpp", "ray-serve-llm"}
    values = values_for(recipes, "llama-110m", "bfloat16", {"repeats": "1", "prompt": "1", "output": "1"})
    for question, name in (("decode", "llamacpp"), ("prefill", "vllm"), ("online", "ray-serve-llm")):
        assert Contender(recipes.contenders[name], question, values, 1.0).name == name


def test_an_unknown_contender_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--question", "decode", "--contenders", "ours", "somebody"])
    assert ended.value.code == 2
    assert "no file describes somebody" in capsys.readouterr().err


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
