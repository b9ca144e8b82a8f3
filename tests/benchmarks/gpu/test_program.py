"""A run of `python -m benchmarks gpu` over scripted sections: what it keeps, how long it takes, and when it ends."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.child import describe
from benchmarks.gpu.plan import DESCRIBE_S, NAMES, SECTIONS, TOTAL_S, Section, sections_within
from benchmarks.gpu.program import CannotRun, launch_process, open_states, run_sections
from benchmarks.gpu.recorder import Recorder, Unavailable, read_state, waited
from benchmarks.gpu.settings import Settings, add_settings, settings_of
from benchmarks.harness.common import REPOSITORY, Spread
from benchmarks.questions.gpu import main
from tests.benchmarks.gpu.tiny_sections import TINY


def test_a_figure_is_stored_when_it_is_there_and_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    record = Recorder(path)
    record.measure("speed", lambda: Spread.of([1.0, 2.0, 3.0]))
    assert "speed: 2 ±25%" in capsys.readouterr().out
    assert read_state(path)["figures"]["speed"]["median"] == 2.0

    def fails() -> object:
        raise AssertionError("it is stored")

    again = Recorder(path)
    assert again.measure("speed", fails)["count"] == 3 and again.has("speed") and not again.has("speed", "size")
    path.write_text("{ half a fi")
    assert Recorder(path).figures == {}


def scripted(script: dict[str, list[Any]], calls: list[tuple[str, float]]) -> Any:
    """A launch whose sections do what the script says, a word a call: done, cut, dead, or a figure that is stored first."""

    def launch(name: str, path: Path, seconds: float) -> bool:
        calls.append((name, seconds))
        record = Recorder(path)
        for word in script[name].pop(0):
            if word == "done":
                record.end("done")
            elif word in ("cut", "dead"):
                return bool(word == "dead")
            else:
                record.measure(word, lambda: 1.5)
        return True

    return launch


def test_a_run_goes_on_where_it_was_cut_and_keeps_what_it_has(tmp_path: Path) -> None:
    sections = [Section("one", "One", 100), Section("two", "Two", 50), Section("three", "Three", 50)]
    calls: list[tuple[str, float]] = []
    script: dict[str, list[Any]] = {
        "one": [["a", "done"]],
        "two": [["b", "cut"], ["c", "done"]],
        "three": [["dead"], ["d", "done"]],
    }
    launch = scripted(script, calls)
    first = run_sections(sections, tmp_path, 1000, launch)
    assert [state["status"] for state in first.values()] == ["done", "cut", "failed"]
    assert "not done within 50 s" in first["two"]["reason"] and first["two"]["figures"] == {"b": 1.5}
    assert "without a word" in first["three"]["reason"]
    second = run_sections(sections, tmp_path, 1000, launch)
    assert [name for name, _ in calls] == ["one", "two", "three", "two", "three"]
    assert [state["status"] for state in second.values()] == ["done"] * 3
    assert second["two"]["figures"] == {"b": 1.5, "c": 1.5} and second["two"]["reason"] == ""
    assert dict(calls[:2]) == {"one": 100, "two": 50}


def test_sections_share_the_whole_time_and_none_starts_without(tmp_path: Path) -> None:
    sections = [Section("one", "One", 100), Section("two", "Two", 50)]
    calls: list[tuple[str, float]] = []
    launch = scripted({"one": [["done"]], "two": [["done"]]}, calls)
    found = run_sections(sections, tmp_path, 60, launch, begin=time.monotonic() - 30)
    assert calls[0][1] <= 30
    late = run_sections([sections[1]], tmp_path / "other", 60, launch, begin=time.monotonic() - 58)
    assert found["two"]["status"] == "done" and late["two"]["status"] == "not run"


def test_a_section_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: Any) -> None:
    """The section waits for tests whose process waits; both are gone afterwards."""
    note = tmp_path / "pid"
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nsh -c 'echo $$ > {note}; exec sleep 600' & wait\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    launch = launch_process(TINY)
    assert launch("limits", tmp_path / "limits.json", 3.0) is False
    assert waited(lambda: not Path(f"/proc/{note.read_text().strip()}").exists(), 60) is not None


def test_states_of_another_run_are_refused_until_fresh(tmp_path: Path) -> None:
    open_states(tmp_path, {"device": "A", "commit": "1"}, is_fresh=False)
    open_states(tmp_path, {"device": "A", "commit": "1"}, is_fresh=False)
    with pytest.raises(CannotRun, match=r"other commit.*--fresh"):
        open_states(tmp_path, {"device": "A", "commit": "2"}, is_fresh=False)
    (tmp_path / "limits.json").write_text("{}")
    open_states(tmp_path, {"device": "A", "commit": "2"}, is_fresh=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_the_sections_take_about_half_an_hour() -> None:
    on_one = sum(section.budget_s for section in SECTIONS if section.min_gpus == 1)
    assert TOTAL_S == 1800 and on_one < 1.3 * TOTAL_S
    assert len(set(NAMES)) == len(NAMES)
    for name in NAMES:
        assert (REPOSITORY / "benchmarks" / "gpu" / "sections" / f"{name}.py").exists(), name


def test_a_run_of_13_minutes_has_what_matters_most_first_in_shorter_forms() -> None:
    sections = sections_within(13)
    assert [section.name for section in sections] == [
        *("decode", "offline", "transformers", "checks", "invariance", "memcheck", "attention", "loading", "memory"),
        "recovery",
    ]
    assert next(section.budget_s for section in sections if section.name == "memcheck") >= 110
    assert DESCRIBE_S + sum(section.budget_s for section in sections) <= 13 * 60
    # As many as fit; the last one may be cut, and goes on in the next call.
    assert [section.name for section in sections_within(5)] == ["decode", "offline", "transformers", "checks"]
    for minutes in (1, 3, 7, 11):
        assert sum(section.budget_s for section in sections_within(minutes)) <= 60 * minutes
    assert sections_within(30) == SECTIONS
    short = Settings(is_short=True)
    assert set(short.sizes.rows) < set(Settings().sizes.rows) and short.sizes.repeats < Settings().sizes.repeats
    parser = argparse.ArgumentParser()
    add_settings(parser)
    assert settings_of(parser.parse_args(short.arguments)) == short


@pytest.mark.parametrize(("minutes", "seconds", "is_short"), [("13", 780, True), ("40", TOTAL_S, False)])
def test_minutes_choose_sections_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: str, seconds: int, is_short: bool
) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr("benchmarks.questions.gpu.measured", lambda options, launch: seen.append(options))
    main(["--minutes", minutes, "--out", str(tmp_path)])
    assert (seen[0].seconds, settings_of(seen[0]).is_short) == (seconds, is_short)


def test_without_a_device_the_program_ends_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(Unavailable, match="no CUDA device"):
        describe(Settings())

    def launch(name: str, path: Path, seconds: float) -> bool:
        Recorder(path).end("unavailable", "torch sees no CUDA device")
        return True

    monkeypatch.setattr("benchmarks.questions.gpu.launch_process", lambda settings: launch)
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path)])
    assert ended.value.code == 2 and "no CUDA device" in capsys.readouterr().err
