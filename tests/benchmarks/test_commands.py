"""Every question without a server runs in a tiny form on the demo model and prints its figures. Times are not checked."""

import ast
import json
from typing import Any

import pytest

from benchmarks.__main__ import MODULES, main
from benchmarks.harness.bandwidth import BandwidthProbe, NoCompiler
from benchmarks.harness.common import REPOSITORY
from benchmarks.questions.agreement import Agreement, Answer, compare

TINY = ["--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        BandwidthProbe(1, buffer_bytes=2**20).close()
    except NoCompiler as error:
        pytest.skip(str(error))


def result_of(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> dict[str, Any]:
    """The JSON in the last line of a command's output, which has a table before it."""
    main([name, *arguments])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("|--") for line in lines), "a table for people"
    result: dict[str, Any] = json.loads(lines[-1])
    assert result["benchmark"] == name
    return result


def test_every_question_and_tool_is_a_command_with_a_main(capsys: pytest.CaptureFixture[str]) -> None:
    for name, module in MODULES.items():
        path = REPOSITORY / f"{module.replace('.', '/')}.py"
        (command,) = (node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "main")
        assert isinstance(command, ast.FunctionDef) and command.args.args[0].arg == "argv", name
        assert f'_parser("{name}", __doc__)' in path.read_text(), "its help names the command"
    main([])
    listed = capsys.readouterr().out
    assert [name for name in MODULES if f"  {name} " not in listed] == []


def test_decode(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.bandwidth.beyond_caches", lambda: 2**22)
    result = result_of(
        capsys,
        "decode",
        *("--device", "cpu", "--dtype", "float32", "bfloat16"),
        *("--prompt", "8", "--output", "6", "--repeats", "1"),
    )
    assert result["cases"].keys() == {"float32", "bfloat16"}
    case = result["cases"]["float32"]
    assert case["tokens_per_step"] == 1
    assert case["bytes_per_token"] == pytest.approx(2 * result["cases"]["bfloat16"]["bytes_per_token"], rel=0.01)


def test_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(capsys, "prefill", *TINY, "--prompt", "16", "--repeats", "1")
    assert result["cases"]["float32"]["prefill_tok_s"]["median"] > 0


def test_offline(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--requests", "4", "--max-batch-size", "2", "--repeats", "1"]
    case = result_of(capsys, "offline", *TINY, *arguments)["cases"]["float32"]
    assert (case["prompt_tokens"], case["output_tokens"]) == (16 + 48 + 80 + 112, 16 + 64 + 112 + 32)


def test_a_prefix_that_prompts_share_is_computed_once(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--requests", "4", "--shared", "64", "--repeats", "1", "--set", "prefix_caching=true"]
    case = result_of(capsys, "offline", *TINY, *load)["cases"]["float32"]
    assert case["prompt_tokens"] == 4 * (64 + 16)
    decodes = 4 * 15  # a further token each step
    assert case["computed_tokens"] == 64 + 4 * 16 + decodes


def test_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(capsys, "adapters", *TINY, "--adapters", "2", "--rows", "3", "--rounds", "2")
    assert result["step_ms"].keys() == {"adapters", "none", "no places"}


def test_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    steps = result_of(capsys, "scheduler", "--rows", "2", "--waiting", "3", "--steps", "40")["steps"]
    assert [case["prefix_caching"] for case in steps] == [True, False]
    assert all(case["both_us"]["median"] > 0 for case in steps)


def test_quality_of_the_text_that_every_python_has(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--text", "pydoc", "--characters", "3000", "--ways", "int4", "--length", "64"]
    cases = result_of(capsys, "quality", "--device", "cpu", *words)["cases"]
    assert cases.keys() == {"float32", "bfloat16", "float32+int4", "bfloat16+int4"}
    assert cases["float32"]["loss"] == 0 and cases["float32+int4"]["perplexity"] > 1


def test_only_clear_tokens_count_and_a_free_answer_ends_at_the_first_unclear_one() -> None:
    answer = Answer([1], [5, 6, 7, 8], [1.0, 1.0, 0.001, 1.0])
    same = {"forced": [5, 6, 9, 8], "free": [5, 6, 9, 9]}
    assert compare([answer], [same], 0.01) == Agreement(forced=(3, 3), free=(2, 2))
    assert compare([answer], [same], 0.01).is_complete
    other = {"forced": [5, 6, 7, 9], "free": [5]}
    assert compare([answer, answer], [same, other], 0.01) == Agreement(forced=(5, 6), free=(3, 4))
