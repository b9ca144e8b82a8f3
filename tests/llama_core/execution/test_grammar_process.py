"""The process that follows slow grammars: its start, its end, and what it reads."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from llama_core.execution.grammars import process as grammar_process
from llama_core.execution.grammars.follower import GrammarRefused, GrammarUnavailable
from llama_core.execution.grammars.process import GrammarProcess, SlowRow
from llama_core.text import grammar as grammars
from llama_core.text.registry import load_tokenizer
from llama_core.text.vocabulary_file import VocabularyFile
from tests.support.waiting import wait_until

DEMO = Path(__file__).parents[3] / "demo"
TOKENIZER = load_tokenizer(DEMO / "tokenizer.model")
VOCABULARY = VocabularyFile(str(DEMO / "tokenizer.model"), TOKENIZER.n_words, tuple(sorted(TOKENIZER.stop_ids)))
LATE_S = 120.0  # until a test that waits for something fails


def test_a_process_that_ends_again_refuses_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    process, row = (
        GrammarProcess(VocabularyFile("missing", 300, ())),
        SlowRow(0, "", grammars.regex_grammar("[ab]{4}"), 1, None, [], []),
    )
    with pytest.raises(GrammarRefused, match="could not be followed"):
        process.submit(row).result(LATE_S)
    process.close()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    process = GrammarProcess(VOCABULARY)
    with pytest.raises(GrammarRefused, match="its process has ended twice"):
        process.submit(row).result(LATE_S)
    process.close()
    with pytest.raises(RuntimeError):
        process.submit(row)


def test_a_process_has_a_lower_priority_and_ends_with_its_rank() -> None:
    process = GrammarProcess(VOCABULARY)
    row = SlowRow(0, "", grammars.regex_grammar("ab"), 1, None, [], [])
    found = process.submit(row).result(LATE_S)
    assert found.bits.shape == (1, -(-TOKENIZER.n_words // 32)) and found.bits.any()
    child = process._process._process
    assert child is not None
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == min(19, own + 10)
    assert process._process._connection is not None
    process._process._connection.close()  # as the end of the rank does
    assert child.wait(LATE_S) == 0
    process.close()


def test_a_process_that_cannot_be_started_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)
    process = GrammarProcess(VOCABULARY)
    with pytest.raises(GrammarUnavailable, match="cannot be started"):
        process.submit(SlowRow(0, "", grammars.regex_grammar("[ab]{4}"), 1, None, [], [])).result(LATE_S)
    process.close()


def test_a_row_of_an_ended_answer_ends_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "LONGEST_S", 10 * LATE_S)
    process, grammar = GrammarProcess(VOCABULARY), grammars.regex_grammar("[ab]{4}")
    assert process.submit(SlowRow(0, "", grammar, 1, None, [], [])).result(LATE_S).bits.any()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    ended, other = (process.submit(SlowRow(key, "", grammar, 1, None, [], [])) for key in (1, 2))
    time.sleep(0.1)
    process.forget(1)
    with pytest.raises(GrammarRefused):
        ended.result(LATE_S)
    assert other.result(LATE_S).bits.any()
    process.close()


def test_a_closed_process_ends_during_a_row() -> None:
    process, grammar = GrammarProcess(VOCABULARY), grammars.regex_grammar("[ab]{4}")
    assert process.submit(SlowRow(0, "", grammar, 1, None, [], [])).result(LATE_S).bits.any()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    row = process.submit(SlowRow(1, "", grammar, 1, None, [], []))
    time.sleep(0.1)
    process.close()
    with pytest.raises(GrammarRefused):
        row.result(LATE_S)


def test_a_process_ends_when_no_row_comes() -> None:
    ours, theirs = Pipe()
    program = (
        f"from llama_core.execution.grammars import process; process._IDLE_S = 0.1; process.main({theirs.fileno()})"
    )
    child = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()])
    with ours, theirs:
        ours.send_bytes(json.dumps(asdict(VOCABULARY)).encode())
        assert child.wait(LATE_S) == 0


def test_an_answer_is_read_again_for_as_long_as_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process sends a sign of life after each part that it has read, and each begins a new wait."""
    program = "from llama_core.execution.grammars import process; process._SIGN_OF_LIFE_S = 0.0; "
    popen, waits, num_waits = subprocess.Popen, GrammarProcess._has_answer, 0

    def has_answer(process: GrammarProcess, key: int) -> bool:
        nonlocal num_waits
        num_waits += 1
        return waits(process, key)

    def begun(command: list[str], **how: Any) -> "subprocess.Popen[bytes]":
        return popen([*command[:-1], program + command[-1]], **how)

    monkeypatch.setattr(subprocess, "Popen", begun)
    monkeypatch.setattr(GrammarProcess, "_has_answer", has_answer)
    process, letter = GrammarProcess(VOCABULARY), TOKENIZER.encode("a", bos=False, eos=False)[-1:]
    row = SlowRow(0, "", grammars.regex_grammar("( a){200}"), 1, None, 120 * letter, [])
    assert process.submit(row).result(LATE_S).bits.any() and num_waits > 5
    process.close()


def test_a_process_reads_no_module_of_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    process = GrammarProcess(VOCABULARY)
    assert process.submit(SlowRow(0, "", grammars.regex_grammar("ab"), 1, None, [], [])).result(LATE_S).bits.any()
    process.close()


def test_a_module_of_a_folder_on_the_ranks_path_hides_none_of_the_standard_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "json.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(str(tmp_path))
    process = GrammarProcess(VOCABULARY)
    row = SlowRow(0, "", grammars.regex_grammar("ab"), 1, None, [], [])
    assert process.submit(row).result(LATE_S).bits.any()
    process.close()


def test_a_process_that_ends_by_itself_leaves_no_zombie() -> None:
    process = GrammarProcess(VOCABULARY)
    process.submit(SlowRow(0, "", grammars.regex_grammar("ab"), 1, None, [], [])).result(LATE_S)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until("the process is reaped", lambda: not Path(f"/proc/{pid}").exists(), pause_s=0.01)
    process.close()
