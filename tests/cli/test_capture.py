"""`llama-ray capture` and `llama-ray replay` as a user runs them, against the HTTP application with a scripted engine."""

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.capture import BadRequestFile, body_of
from cli.replay import fact_differences, first_difference, read_capture, token_differences
from deployments.http.capture.folder import CaptureFolder
from tests.cli.conftest import llama_ray
from tests.support.scripted_engine import FakeEngine, Served, serve


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve(FakeEngine(), captures=CaptureFolder(tmp_path / "captures", 2**20)) as server:
        yield server


def taken(served: Served, file: Path, *words: str) -> dict[str, Any]:
    done = llama_ray("capture", "--url", served.url, "-o", str(file), *words)
    assert (done.returncode, done.stdout.strip()) == (0, str(file)), done.stderr
    assert served.engine.answer[:10] in done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_question_is_captured_and_replayed_with_its_seed(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "bug.json"
    found = taken(served, file, "-q", "Hi", "--set", "max_tokens=20", "--set", "user=me")
    assert found["body"] == {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "user": "me"}
    assert found["route"] == "/v1/chat/completions" and stat.S_IMODE(file.stat().st_mode) == 0o600
    done = llama_ray("replay", str(file), "--url", served.url, "-o", str(tmp_path / "again.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    num_tokens = len(found["choices"][0]["tokens"])
    assert done.stdout.strip() == f"the same {num_tokens} tokens"
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["body"]["seed"] == found["seed"] == again["seed"]


def test_a_number_of_tokens_takes_a_unit_and_other_text_stays() -> None:
    fields = ["max_tokens=1k", "min_tokens=3", "user=8k", "temperature=0.5", "max_output_tokens=some"]
    assert body_of(None, None, "Once", fields) == {
        "prompt": "Once",
        "max_tokens": 1000,
        "min_tokens": 3,
        "user": "8k",
        "temperature": 0.5,
        "max_output_tokens": "some",
    }


def test_a_request_file_is_streamed_as_it_says_and_stdin_is_read(served: Served, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(
        json.dumps({"prompt": "Once", "stream": True, "model": served.engine.model_id, "max_tokens": 30})
    )
    found = taken(served, tmp_path / "a.json", str(request))
    assert found["route"] == "/v1/completions" and found["outcome"] == "complete"
    done = llama_ray("capture", "-", "--url", served.url, "-o", str(tmp_path / "b.json"), stdin=request.read_text())
    assert done.returncode == 0
    assert json.loads((tmp_path / "b.json").read_text())["prompts"] == found["prompts"]


def test_replay_says_which_token_differs_and_what_else_does(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "bug.json"
    found = taken(served, file, "--prompt", "Once", "--set", "max_tokens=30")
    tokens = found["choices"][0]["tokens"]
    tokens[3] += 1
    found["choices"][0]["text"] = "Hello where"
    found["model"]["digest"], found["versions"]["torch"] = "00ff", "1.0"
    file.write_text(json.dumps(found))
    done = llama_ray("replay", str(file), "--url", served.url)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[0] == f"choice 0: token 3 differs, {tokens[3]} then and {tokens[3] - 1} now"
    assert lines[1] == "  then: 'Hello where'" and served.engine.answer in lines[2]
    assert any(line.startswith("model.digest: 00ff then") for line in lines)
    assert any(line.startswith("versions.torch: 1.0 then") for line in lines)


def test_a_server_that_allows_no_captures_is_named(tmp_path: Path) -> None:
    with serve(FakeEngine()) as server:
        done = llama_ray("capture", "-q", "Hi", "--url", server.url, "-o", str(tmp_path / "x.json"))
    assert done.returncode == 1 and "capture_dir" in done.stderr and not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["capture"], "give a request file"),
        (["capture", "-q", "a", "--prompt", "b"], "only one of them"),
        (["capture", "missing.json"], "cannot be read"),
        (["capture", "-q", "a", "--set", "x"], "NAME=VALUE"),
        (["replay", "missing.json"], "cannot be read"),
        (["replay", "pyproject.toml"], "not JSON"),
    ],
)
def test_wrong_arguments_are_named(words: list[str], says: str) -> None:
    done = llama_ray(*words, "--url", "http://127.0.0.1:9")
    assert done.returncode == 2 and done.stderr.startswith(f"{words[0]}: ") and says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_was_edited_is_refused_with_the_place(tmp_path: Path) -> None:
    file = tmp_path / "edited.json"
    whole = FACTS | CAPTURE
    whole |= {"capture": 1, "route": "/v1/completions", "body": {"prompt": "a"}, "seed": 1, "outcome": "complete"}
    edits: list[tuple[dict[str, Any], str]] = [
        *(({name: value}, name) for name in ("route", "body", "choices", "model", "cpu") for value in (None, 5)),
        *(({"route": value}, "route") for value in ("é", "v1/completions", "/a b", "/\u001b")),
        *(({"choices": value}, place) for value, place in (
            ("x", "choices"), ([5], "choices[0]"), ([{"text": "", "finish_reason": None}], "choices[0].tokens"),
            ([CHOICE, CHOICE | {"tokens": ["5"]}], "choices[1].tokens[0]"), ([CHOICE | {"text": None}], "choices[0].text"),
        )),
        ({"body": [1]}, "body"), ({"settings": 5}, "settings"), ({"versions": []}, "versions"), ({"seed": "1"}, "seed"),
        ({"seed": True}, "seed"), ({"prompts": [1]}, "prompts[0]"), ({"capture": 2}, "capture"), ({"capture": True}, "capture"),
    ]  # fmt: skip
    for edit, place in edits:
        file.write_text(json.dumps(whole | edit))
        with pytest.raises(BadRequestFile, match=rf": {re.escape(place)} is missing or wrong$"):
            read_capture(file)
    file.write_text(json.dumps(whole))
    assert read_capture(file) == whole
    file.write_text("[" * 100_000)
    with pytest.raises(BadRequestFile, match=r"is nested too deep$"):
        read_capture(file)
    file.write_text(json.dumps(whole | {"route": None}))
    done = llama_ray("replay", str(file), "--url", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_body_nested_too_deep_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    for levels in range(800, 1000, 20):
        file.write_text('{"prompt": ' + "[" * levels + "]" * levels + "}")
        done = llama_ray("capture", str(file), "--url", "http://127.0.0.1:9")
        assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("capture: "), done.stderr
        if "nested too deep" in done.stderr:
            break
    assert done.returncode == 2


def test_control_characters_of_a_file_are_escaped(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "bug.json"
    found = taken(served, file, "--prompt", "Once", "--set", "max_tokens=9")
    found["model"]["id"], found["cpu"]["a\u001b[2J"] = "a\u001b[31m\nb\u202eé", "\ud800"
    file.write_text(json.dumps(found))
    lines = llama_ray("replay", str(file), "--url", served.url).stdout.splitlines()
    assert f"model.id: a\\x1b[31m\\nb\\u202eé then, {served.engine.model_id} now" in lines
    assert "cpu.a\\x1b[2J: \\ud800 then, absent now" in lines


CHOICE = {"tokens": [5, 6, 7], "text": "abc", "finish_reason": "stop"}
CAPTURE: dict[str, Any] = {"prompts": [[1, 2]], "choices": [CHOICE]}
FACTS: dict[str, Any] = {"model": {}, "versions": {"ray": "2"}, "settings": {}, "cpu": {}}


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (CAPTURE, []),
        (CAPTURE | {"prompts": [[1, 3]]}, ["prompt 0: token 1 differs, 2 then and 3 now"]),
        (CAPTURE | {"choices": [CHOICE, CHOICE]}, ["1 choices then and 2 now"]),
        (CAPTURE | {"choices": [CHOICE | {"tokens": [5]}]}, ["choice 0: token 1 differs, 6 then and the end now"]),
        (
            CAPTURE | {"choices": [CHOICE | {"finish_reason": "length"}]},
            ["choice 0: the same tokens, but stop then and length now"],
        ),
    ],
)
def test_differences_are_lines(new: dict[str, Any], says: list[str]) -> None:
    found = [line for line in token_differences(CAPTURE, new) if not line.startswith(" ")]
    assert found == says


def test_a_capture_that_was_cut_off_is_compared_as_far_as_it_goes() -> None:
    cut = CAPTURE | {"choices": [CHOICE | {"tokens": [5, 6], "finish_reason": None}]}
    assert not list(token_differences(cut, CAPTURE))
    assert list(token_differences(CAPTURE, cut))


def test_facts_that_only_one_capture_has_are_named() -> None:
    assert list(fact_differences(FACTS, FACTS | {"versions": {"torch": "3"}})) == [
        "versions.ray: 2 then, absent now",
        "versions.torch: absent then, 3 now",
    ]
    assert first_difference([1], [1]) is None and first_difference([], [1]) == 0
