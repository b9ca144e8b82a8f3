"""Every question without a server runs in a tiny form on the demo model and prints its figures. Times are not checked."""

import ast
import json
from typing import Any

import pytest

from benchmarks.__main__ import MODULES, QUESTIONS, main
from benchmarks.harness.bandwidth import NoCompiler, probe_bandwidth
from benchmarks.harness.common import REPOSITORY
from benchmarks.questions import loading

TINY = ["--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        probe_bandwidth(1, buffer_bytes=2**20, passes=1)
    except NoCompiler as error:
        pytest.skip(str(error))


def result_of(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> dict[str, Any]:
    """The JSON in the last line of a command's output, which has a table before it."""
    main([name, *arguments])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.lstrip().startswith("--") for line in lines), "a table for people"
    result: dict[str, Any] = json.loads(lines[-1])
    assert result["benchmark"] == name
    return result


def test_every_question_and_tool_is_a_command_with_a_main(capsys: pytest.CaptureFixture[str]) -> None:
    questions = {path.stem for path in (REPOSITORY / "benchmarks" / "questions").glob("[!_]*.py")}
    assert set(QUESTIONS) == questions
    for name, module in MODULES.items():
        path = REPOSITORY / f"{module.replace('.', '/')}.py"
        (command,) = (node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "main")
        assert isinstance(command, ast.FunctionDef) and [one.arg for one in command.args.args] == ["argv"], name
        assert f'_parser("{name}", __doc__)' in path.read_text(), "its help names the command"
    main([])
    listed = capsys.readouterr().out
    assert [name for name in MODULES if f"  {name} " not in listed] == []


def test_an_unknown_command_gets_the_list_of_commands() -> None:
    with pytest.raises(SystemExit, match=r"(?s)there is no benchmark decod\n.*  decode "):
        main(["decod"])


def test_limits(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(capsys, "limits", "--buffer-mib", "1", "4", "--size", "64", "--passes", "2")
    assert all(one["gb_s"]["median"] > 0 for one in result["bandwidth"])
    assert result["matmul_gflop_s"].keys() == {"bfloat16", "float32"}


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


def test_online_in_process(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--prompt", "8", "--output", "4", "--concurrency", "1", "3", "--requests", "2", "6"]
    arguments = ["--in-process", *load, "--repeats", "1", "--vocab-size", "500"]
    cases = result_of(capsys, "online", *TINY, *arguments)["cases"]
    assert {clients: case["failed"] for clients, case in cases.items()} == {"1": 0, "3": 0}


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_step_has_every_part_once_and_together_they_are_the_step(
    capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    arguments = [
        "--rows",
        "1",
        "2",
        "--context",
        "8",
        "--steps",
        "4",
        "--repeats",
        "1",
        "--set",
        f"backend={backend}",
    ]
    cases = result_of(capsys, "step", *TINY, *arguments)["cases"]
    assert [case["rows"] for case in cases] == [1, 2]
    for case in cases:
        names = [part["part"] for part in case["parts"]]
        assert len(names) == len(set(names)) > 4
        assert sum(part["read_bytes"] for part in case["parts"]) == pytest.approx(case["read_bytes"], rel=0.01)


def test_growth(capsys: pytest.CaptureFixture[str]) -> None:
    points = ["--rows", "1", "2", "3", "--context", "8", "16", "24", "--rows-context", "8", "--context-rows", "2"]
    result = result_of(capsys, "growth", *TINY, *points, "--steps", "3", "--repeats", "2")
    assert [series["vary"] for series in result["series"]] == ["rows", "context"]


def test_prefix_sharing_computes_the_prefix_once_and_changes_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--requests", "4", "--shared", "64", "--own", "4", "--output", "3", "--repeats", "1"]
    result = result_of(capsys, "prefix", *TINY, *sizes)
    assert result["same_tokens"]
    assert result["cases"]["not shared"]["prefill_tokens"] == 4 * 68
    assert result["cases"]["shared"]["prefill_tokens"] == 64 + 4 * 4


def test_speculation_changes_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(capsys, "speculation", *TINY, "--prompt", "48", "--output", "16", "--repeats", "1")
    assert len(result["cases"]) == 4
    assert all(case["same_tokens"] for case in result["cases"].values())


def test_loading(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(case: str, *given: Any) -> dict[str, float]:
        """One case in a process of its own, the others in this one, which has imported torch."""
        return (own if case == "cpu" else loading.measure)(case, *given)

    own = loading.in_process_of_its_own
    monkeypatch.setattr(loading, "in_process_of_its_own", load)
    monkeypatch.setattr(loading, "wait_quiet", lambda: None)  # beside other tests the machine is never idle
    cases = result_of(capsys, "loading", "--rounds", "1", "--ranks", "2")["cases"]
    assert cases.keys() == {"read", "cpu", "gpu_host", "mapped"}, "the demo model's files are not safetensors"
    assert cases["cpu"]["gb"] == pytest.approx(cases["read"]["gb"] / 2, rel=0.05)
    assert cases["gpu_host"]["gb"] == cases["mapped"]["gb"] == cases["cpu"]["gb"]


def test_streaming(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--step-ms", "1", "--concurrency", "1", "3", "--output", "4", "--seconds", "0.1", "--repeats", "2"]
    streams = result_of(capsys, "streaming", *load)["streams"]
    assert streams.keys() == {"1", "3"}
    assert all(figures["a further token, us"].keys() == {"replica", "client"} for figures in streams.values())
    assert all(figures["a request, us"]["replica"]["median"] > 0 for figures in streams.values())
