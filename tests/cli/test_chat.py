"""`llama-ray chat` against a scripted server, as a process with pipes and on a terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import ScriptedServer, llama_ray
from tests.support.programs import REPOSITORY, environment


def test_one_question_prints_the_answer_alone(scripted: ScriptedServer) -> None:
    words = ("chat", "-q", "Hi", "--system", "Be brief.", "--temperature", "0", "--max-tokens", "1k")
    done = llama_ray(*words, "--url", scripted.url, env={"LLAMA_RAY_API_KEY": "secret-key"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello there.\n", "")
    seen = scripted.next_request()
    assert seen["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert seen["path"] == "/v1/chat/completions" and seen["auth"] == "Bearer secret-key"
    assert (seen["temperature"], seen["max_tokens"], seen["model"]) == (0, 1000, "plain") and "top_p" not in seen


def test_the_question_comes_from_stdin_and_the_url_from_the_environment_or_an_argument(
    scripted: ScriptedServer,
) -> None:
    """The argument wins over the option."""
    done = llama_ray("chat", "-q", "-", stdin="What is this?", env={"LLAMA_RAY_URL": scripted.url + "/v1/"})
    assert (done.returncode, done.stdout) == (0, "Hello there.\n")
    assert scripted.next_request()["messages"][-1]["content"] == "What is this?"
    done = llama_ray("chat", scripted.url, "-q", "Hi", "--url", "http://127.0.0.1:1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello there.\n", "")


def test_reasoning_goes_to_stderr_and_tool_calls_are_json(scripted: ScriptedServer) -> None:
    done = llama_ray("chat", "--url", scripted.url, "--model", "reasons", "-q", "3 + 4?")
    assert (done.stdout, done.stderr) == ("Seven.\n", "Let me think.\n")
    done = llama_ray("chat", "--url", scripted.url, "--model", "tool", "-q", "weather?")
    call = json.loads(done.stdout)
    assert call["id"] == "call_7" and call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}


def test_a_failed_request_has_status_one_and_the_servers_words(scripted: ScriptedServer) -> None:
    for model, words in (
        ("refuses", "HTTP 429: too many requests wait"),
        ("breaks", "the stream ended without [DONE]"),
        ("fails", "the ranks failed"),
    ):
        done = llama_ray("chat", "--url", scripted.url, "--model", model, "-q", "Hi")
        assert done.returncode == 1 and done.stderr == f"chat: {words}\n", model
    done = llama_ray("chat", "--url", "http://127.0.0.1:9", "-q", "Hi")
    assert done.returncode == 1 and done.stderr.startswith("chat: ") and "Traceback" not in done.stderr


def test_a_conversation_keeps_its_messages_until_reset(scripted: ScriptedServer) -> None:
    text = 'one\ntwo\n/reset\nthree\n/system Speak Danish.\n"""\nfour\nlines\n"""\n/restart\n/exit\nnever sent'
    done = llama_ray("chat", "--url", scripted.url, stdin=text)
    assert done.returncode == 0 and done.stdout.count("Hello there.\n") == 4
    assert "/restart: no such command\n/reset " in done.stdout
    said = [[message["content"] for message in scripted.next_request()["messages"]] for _ in range(4)]
    assert said == [["one"], ["one", "Hello there.", "two"], ["three"], ["Speak Danish.", "four\nlines"]]


def test_ctrl_c_stops_the_answer_and_not_the_program(scripted: ScriptedServer, tmp_path: Path) -> None:
    history = tmp_path / "state" / "history"
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "chat", "--url", scripted.url, "--model", "slow"],
        cwd=REPOSITORY,
        env=environment(LLAMA_RAY_HISTORY=str(history), NO_COLOR="1", TERM="dumb"),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown = b""

    def wait_for(words: bytes, count: int = 1) -> None:
        nonlocal shown
        while shown.count(words) < count:
            assert select.select([controller], [], [], 120)[0], shown[-2000:]
            shown += os.read(controller, 4096)

    try:
        wait_for(b"> ")
        os.write(controller, b"count\n")
        wait_for(b"3 4 5 ")
        os.kill(process.pid, signal.SIGINT)
        wait_for(b"[stopped]")
        wait_for(b"> ", 2)
        requests = [scripted.next_request(), scripted.next_request()]
        assert requests[0]["messages"] == [{"role": "user", "content": "count"}] and requests[1] == {"cancelled": True}
        os.write(controller, b"/exit\n")
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
        os.close(controller)
    assert history.read_text().splitlines() == ["count", "/exit"]
    assert history.stat().st_mode & 0o077 == 0
