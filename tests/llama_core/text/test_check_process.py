"""Grammars whose check takes long: found in time, checked by a process with the same outcome, and bounded."""

import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any
from unittest.mock import patch

import pytest

from llama_core import json_process
from llama_core.errors import InvalidParameter
from llama_core.json_process import JsonProcess
from llama_core.text import check_process
from llama_core.text.check_process import CheckProcess
from llama_core.text.grammar import (
    BRIEFLY,
    IN_FULL,
    TOO_LARGE,
    Checks,
    TakesLong,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from llama_core.text.schema_forms.expansion import Expansion
from tests.support.faulty_schemas import FAULTS
from tests.support.processor_time import processor_s

LATE_S = 120.0  # until a test that waits for something fails


def integers(number: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"key_{i}": {"type": "integer"} for i in range(number)}} | more


def joined(num_patterns: int) -> dict[str, Any]:
    """A schema of a text that all patterns must match."""
    return {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(num_patterns)]}


def circle(number: int) -> str:
    """Definitions that refer to each other in place. No value follows them."""
    definitions = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{(i + 1) % number}"}]} for i in range(number)}
    return json_schema_grammar({"$ref": "#/$defs/d0", "$defs": definitions})


ORDINARY = {
    "ampersand": json_schema_grammar({"type": "string", "description": "R&D, ~ 9 words"}),
    "few joined patterns": json_schema_grammar(joined(2)),
    "object": json_object_grammar(),
    "schema": json_schema_grammar(integers(8, required=["key_1"], additionalProperties=False)),
    "rewritten": json_schema_grammar({"type": "array", "items": {"enum": [1, "a"]}, "uniqueItems": True}),
    "unique": json_schema_grammar({"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
    "cents": json_schema_grammar({"type": "array", "items": {"type": "number", "multipleOf": 0.01}}),
    "multiple in Lark": lark_grammar('start: %json {"type": "integer", "multipleOf": 3}'),
    "regex": regex_grammar("[a-z]{1,9}(, [a-z]{1,9}){3}"),
    "choice": choice_grammar([f"choice {i}" for i in range(200)]),
    "choice of other scripts": choice_grammar(["oui", "peut-être", "正", "😀"]),
    "escapes in a pattern": json_schema_grammar({"type": "string", "pattern": r"[\u0041-\u0043]{3}"}),
    "lark": lark_grammar('start: s\ns: s s | "a" | "é"'),
    "gbnf": lark_grammar('root ::= "a" [0-9]{1,3}'),
    "bad lark": lark_grammar('start: "a" b'),
    "bad regex": regex_grammar("(a"),
    "counted ranges": lark_grammar("start: " + " ".join(f'("a"|"b"){{0,{i + 5}}}' for i in range(100))),
    "ranges of integers": json_schema_grammar(
        {"properties": {f"key_{i}": {"minimum": i, "maximum": 9} for i in range(90)}}
    ),
    "circle in place": circle(100),
    "many items": json_schema_grammar({"anyOf": [integers(60 + i) for i in range(7)]}),
} | {
    f"fault {i}": json_schema_grammar(schema)
    for i, (schema, *_) in enumerate(FAULTS)
    if schema.get("minLength") != 100_000
}
LONG = {
    "undecided": json_schema_grammar({"type": "string", "pattern": "a.*b", "minLength": 100_000}),
    "joined patterns": json_schema_grammar(joined(13)),
    "counted ranges": lark_grammar("start: " + " ".join(f'("a"|"b"){{0,{i + 5}}}' for i in range(170))),
    "ranges of integers": json_schema_grammar({"properties": {f"key_{i}": {"minimum": i, "maximum": 9} for i in range(120)}}),
    "joined terminals": lark_grammar("start: A\nA: /(.|\\n)*a.{2}/ & ~/b.*/"),
    "integers": json_schema_grammar(integers(150, additionalProperties=False)),
    "too many": json_schema_grammar(integers(900, additionalProperties=False)),
    "strings": json_schema_grammar({"properties": {f"key_{i}": {"maxLength": i} for i in range(1500)}}),
    "regex": regex_grammar("(a{1000}){1000}"),
    "terminal": lark_grammar("start: A+\nA: " + " | ".join(f'"a{i}"' for i in range(2000))),
    "multiple": json_schema_grammar({"type": "integer", "multipleOf": 1009}),
    "two multiples": json_schema_grammar({"type": "integer", "allOf": [{"multipleOf": 7}, {"multipleOf": 9}]}),
    "escaped": lark_grammar('start: %json {"type": "integer", "multiple\\u004ff": 3}'),
    "bad": lark_grammar('start: b\na: "' + "a" * 30_000 + '"'),
    "bad schema": json_schema_grammar(integers(700, required=["key_1"], minProperties=3)),
    "contradiction": json_schema_grammar({"type": "integer", "allOf": [{"multipleOf": 2000}], "minimum": 3, "maximum": 1}),
}  # fmt: skip


def outcome(by: Checks, grammar: str, *, is_whole: bool = True) -> tuple[str, str | None] | str:
    try:
        return by.checked_grammar(grammar, "field", "field.schema", is_whole=is_whole)
    except InvalidParameter as refused:
        return refused.message, refused.param


@pytest.fixture
def process() -> Iterator[CheckProcess]:
    process = CheckProcess()
    yield process
    process._process.end()


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_grammar_is_checked_briefly_with_the_same_outcome(name: str) -> None:
    for is_whole in (True, False):
        assert outcome(BRIEFLY, ORDINARY[name], is_whole=is_whole) == outcome(
            IN_FULL, ORDINARY[name], is_whole=is_whole
        )


@pytest.mark.parametrize("name", LONG)
def test_what_takes_long_is_not_decided_briefly(name: str) -> None:
    with pytest.raises(TakesLong):
        BRIEFLY.checked_grammar(LONG[name], "field")


def test_the_process_has_the_same_outcomes(process: CheckProcess) -> None:
    for name, grammar in (LONG | ORDINARY).items():
        for is_whole in (True, False) if name in ORDINARY else (True,):
            found = outcome(process, grammar, is_whole=is_whole)
            assert found == outcome(IN_FULL, grammar, is_whole=is_whole), name


def test_a_brief_check_takes_no_longer_for_what_it_does_not_decide() -> None:
    def check_s(grammar: str) -> float:
        def check() -> None:
            with suppress(TakesLong):
                outcome(BRIEFLY, grammar)

        return processor_s(check, 1)

    longest_s = max(map(check_s, ORDINARY.values()))
    for name, grammar in LONG.items():
        assert check_s(grammar) < 10 * longest_s, name


def test_a_circle_in_place_is_followed_a_few_times() -> None:
    """And not again for each definition, and each that refers to it."""
    names = [f"d{i}" for i in range(60)]
    definitions = {
        name: {"allOf": [{"$ref": f"#/$defs/{names[i - 1]}"}], "$ref": f"#/$defs/{names[i - 2]}"}
        for i, name in enumerate(names)
    }
    with patch.object(Expansion, "_terms", autospec=True, side_effect=Expansion._terms) as written:
        outcome(IN_FULL, json_schema_grammar({"$ref": "#/$defs/d0", "$defs": definitions}))
    assert 60 < written.call_count < 600


def test_long_gbnf_is_converted_in_the_process(process: CheckProcess) -> None:
    rules = "\n".join(f'r{i} ::= "{i}{"x" * 200}" r{i + 1}' for i in range(120))
    source = f'root ::= "a" r0\n{rules}\nr120 ::= "é"'
    with pytest.raises(TakesLong):
        BRIEFLY.lark_grammar(source)
    assert process.lark_grammar(source) == lark_grammar(source)
    bad = source + "\nroot ::= ("
    with pytest.raises(InvalidParameter) as expected:
        lark_grammar(bad)
    with pytest.raises(InvalidParameter) as refused:
        process.lark_grammar(bad)
    assert refused.value.message == expected.value.message


def test_a_killed_process_is_replaced(process: CheckProcess) -> None:
    expected = outcome(process, LONG["multiple"])
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert outcome(process, LONG["multiple"]) == expected and process.pid not in (None, first)


def test_a_stopped_process_refuses_one_check_and_is_replaced(
    process: CheckProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_process, "_LONGEST_S", 0.2)
    process._process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(TakesLong):
        process.checked_grammar(LONG["multiple"], "field")
    monkeypatch.setattr(check_process, "_LONGEST_S", LATE_S)
    assert "multipleOf" in process.checked_grammar(LONG["multiple"], "field")


def test_a_send_to_a_stopped_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_process, "_LONGEST_TRANSFER_S", 1)
    process = JsonProcess("llama_core.text.check_process")
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(BlockingIOError):
        process.send({"name": "x" * 2**22})
    assert process.end() == -signal.SIGKILL and process.pid is None


def test_an_answer_that_stops_in_the_middle_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_process, "_LONGEST_TRANSFER_S", 1)
    process = JsonProcess("llama_core.text.check_process")
    ours, theirs = Pipe()
    json_process._bound_transfers(ours)
    process._connection = ours
    with theirs:
        os.write(theirs.fileno(), struct.pack("!i", 100) + b"{")
        assert process.has_answer(LATE_S)
        with pytest.raises(BlockingIOError):
            process.answer()
    process.end()


def test_a_check_ends_with_the_replica(process: CheckProcess) -> None:
    process.checked_grammar(ORDINARY["schema"], "field")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    ends: list[BaseException] = []

    def check() -> None:
        try:
            process.checked_grammar(LONG["multiple"], "field")
        except TakesLong as end:
            ends.append(end)

    thread = threading.Thread(target=check)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    process.close()
    thread.join(LATE_S)
    assert len(ends) == 1 and process.pid is None
    with pytest.raises(TakesLong):
        process.checked_grammar(LONG["multiple"], "field")
    assert process.pid is None


def test_a_check_beyond_memory_writes_one_line_to_the_log(
    process: CheckProcess, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    outcome(process, json_schema_grammar({"type": "integer", "multipleOf": 9999991}))
    assert [record.getMessage() for record in caplog.records] == [
        "a grammar is refused: its check takes over 32 MiB of memory"
    ]
    assert "memory allocation" not in capfd.readouterr().err


def test_what_python_says_in_the_process_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = Pipe()
    program = f"from llama_core.text import check_process as c; c._answer = None; c.main({theirs.fileno()})"
    with ours, theirs:
        child = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()])
        ours.send_bytes(b"{}")
        assert child.wait(LATE_S) == 1
    assert "TypeError" in capfd.readouterr().err


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 9999991},
        {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}], "type": "integer"},
        joined(30),
    ],
)
def test_a_check_that_exceeds_memory_is_refused(schema: dict[str, Any], process: CheckProcess) -> None:
    """llguidance would take gigabytes."""
    assert outcome(process, json_schema_grammar(schema)) == (f"field.schema: {TOO_LARGE}", "field.schema")
    assert process.pid is None and isinstance(outcome(process, ORDINARY["schema"]), str)


def test_a_check_that_exceeds_processor_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "from llama_core.text import check_process as c; c._LONGEST_CPU_S = 0;"
        "c._answer = lambda *_: all(True for _ in iter(lambda: 0, 1)); "
    )
    popen = subprocess.Popen

    def started(command: list[str], **how: Any) -> "subprocess.Popen[bytes]":
        return popen([*command[:-1], program + command[-1]], **how)

    monkeypatch.setattr(subprocess, "Popen", started)
    assert outcome(CheckProcess(), LONG["multiple"]) == (f"field.schema: {TOO_LARGE}", "field.schema")


def test_without_a_process_a_thread_checks(process: CheckProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)
    for name in ("multiple", "bad schema"):
        assert outcome(process, LONG[name]) == outcome(IN_FULL, LONG[name])
    assert process.pid is None


def test_a_process_that_ends_twice_decides_nothing(process: CheckProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TakesLong):
        process.checked_grammar(LONG["multiple"], "field")


def test_the_process_ends_with_the_replica_and_when_no_check_comes(process: CheckProcess) -> None:
    process.checked_grammar(ORDINARY["schema"], "field")
    child = process._process._process
    assert child is not None and process._process._connection is not None
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == min(19, own + 10)
    process._process._connection.close()
    assert child.wait(LATE_S) == 0
    ours, theirs = Pipe()
    program = f"from llama_core.text import check_process as c; c._IDLE_S = 0.1; c.main({theirs.fileno()})"
    with ours, theirs:
        idle = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()])
        assert idle.wait(LATE_S) == 0


def test_checks_of_several_threads_are_made_one_after_the_other(process: CheckProcess) -> None:
    names = ("multiple", "two multiples", "bad", "contradiction")
    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: outcome(process, LONG[name])})) for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: outcome(IN_FULL, LONG[name]) for name in names}
