"""A run of `python -m benchmarks gpu` over scripted sections: what it keeps, how long it takes, and when it ends."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.child import describe
from benchmarks.gpu.recorder import Recorder, Unavailable, read_run, waited
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import Spread
from benchmarks.questions.gpu import SECTIONS, launch_process, main
from tests.benchmarks.gpu.tiny_sections import TINY


def test_a_figure_is_stored_when_it_is_there_and_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    record = Recorder(path, "decode")
    record.measure("speed", lambda: Spread.of([1.0, 2.0, 3.0]))
    assert "speed: 2 ±25%" in capsys.readouterr().out
    assert read_run(path)["sections"]["decode"]["figures"]["speed"]["median"] == 2.0

    def fails() -> object:
        raise AssertionError("it is stored")

    again = Recorder(path, "decode")
    assert again.measure("speed", fails)["count"] == 3 and again.has("speed") and not again.has("speed", "size")


class Script:
    """A launch whose sections do what the script says, a word a call: done, cut, dead, or a figure that is stored first."""

    def __init__(self, script: dict[str, list[list[str]]]) -> None:
        self._script = {"device": [["done"]]} | script
        self.calls: list[tuple[str, float]] = []

    def __call__(self, name: str, path: Path, settings: Settings, seconds: float) -> bool:
        self.calls.append((name, seconds))
        record = Recorder(path, name)
        if name == "device":
            record.put("device", {"name": "a device"})
        for word in self._script[name].pop(0):
            if word == "done":
                record.end("done")
            elif word in ("cut", "dead"):
                return word == "dead"
            else:
                record.measure(word, lambda: 1.5)
        return True


def test_a_run_goes_on_where_it_was_cut_and_keeps_what_it_has(tmp_path: Path) -> None:
    script = Script(
        {"decode": [["a", "done"]], "offline": [["b", "cut"], ["c", "done"]], "mixed": [["dead"], ["d", "done"]]}
    )
    path = tmp_path / "run.json"
    words = ["--only", "decode", "offline", "mixed", "--out", str(path)]
    main(words, script)
    first = read_run(path)["sections"]
    assert [first[name]["status"] for name in ("decode", "offline", "mixed")] == ["done", "cut", "failed"]
    assert "not done within 40 s" in first["offline"]["reason"] and first["offline"]["figures"] == {"b": 1.5}
    assert "without a word" in first["mixed"]["reason"]
    main(words, script)
    second = read_run(path)["sections"]
    assert [name for name, _ in script.calls] == ["device", "decode", "offline", "mixed", "offline", "mixed"]
    assert {second[name]["status"] for name in second} == {"done"}
    assert second["offline"]["figures"] == {"b": 1.5, "c": 1.5} and second["offline"]["reason"] == ""
    assert read_run(path)["device"] == "a device" and read_run(path)["summary"]["batch_1_tok_s"] is None


def test_sections_share_the_whole_time_and_none_starts_without(tmp_path: Path) -> None:
    script = Script({"decode": [["done"]], "offline": [["done"]]})
    main(["--only", "decode", "--seconds", "30", "--out", str(tmp_path / "a.json")], script)
    assert script.calls[1][1] <= 30
    main(["--only", "offline", "--seconds", "2", "--out", str(tmp_path / "b.json")], Script({}))
    assert read_run(tmp_path / "b.json")["sections"].keys() >= {"device"}


def test_a_section_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: Any) -> None:
    note = tmp_path / "pid"
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nsh -c 'echo $$ > {note}; exec sleep 600' & wait\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    assert launch_process("decode", tmp_path / "run.json", TINY, 3.0) is False
    assert waited(lambda: not Path(f"/proc/{note.read_text().strip()}").exists(), 60) is not None


def test_figures_of_another_run_are_refused_until_fresh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    words = ["--only", "decode", "--out", str(path)]
    main(words, Script({"decode": [["a", "done"]]}))
    path.write_text(json.dumps(read_run(path) | {"commit": "another"}))
    with pytest.raises(SystemExit):
        main(words, Script({}))
    assert "other commit" in capsys.readouterr().err
    main([*words, "--fresh"], Script({"decode": [["b", "done"]]}))
    assert read_run(path)["sections"]["decode"]["figures"] == {"b": 1.5}


def test_without_a_device_the_program_ends_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(Unavailable, match="no CUDA device"):
        describe(Settings())

    def launch(name: str, path: Path, settings: Settings, seconds: float) -> bool:
        Recorder(path, name).end("unavailable", "torch sees no CUDA device")
        return True

    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "run.json")], launch)
    assert ended.value.code == 2 and "no CUDA device" in capsys.readouterr().err
    assert sum(SECTIONS.values()) < 1800
