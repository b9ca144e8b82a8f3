"""`llama-ray batch` against a scripted server: each line gets one answer, whatever breaks and however often it is killed."""

import asyncio
import gc
import json
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import batch
from cli.batch import Batch, Output
from cli.main import app
from cli.openai_http import ApiError
from deployments.openai.field_types import MAX_PRIORITY
from tests.cli.conftest import llama_ray
from tests.support.programs import REPOSITORY, environment
from tests.support.waiting import wait_until

Script = Callable[[str, int], tuple[int, dict[str, str]] | None]
IN_FLIGHT = 18  # two engines, each with eight slots and one request that waits


class Answering(ThreadingHTTPServer):
    """Answers each request with its own body, once `script` has said how: by custom_id and the number of the try, a status and
    headers, or None to break the connection."""

    daemon_threads = True
    keeps_bodies = True

    def __init__(self, script: Script) -> None:
        self.script, self.lock = script, threading.Lock()
        self.tries: Counter[str] = Counter()
        self.bodies: dict[str, tuple[str, dict[str, Any]]] = {}
        self.keys: set[str | None] = set()
        self.num_open = self.most_open = 0
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """A client has left."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Answering

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        engines = [{"model": "m"}, {"model": "m"}, {"model": "other"}]
        self._send(200, {"model": "m", "max_batch_size": 8, "max_queue": 64, "engines": engines}, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, server = body["prompt"], self.server
        with server.lock:
            server.tries[name] += 1
            if server.keeps_bodies:
                server.bodies[name] = self.path, body
            server.num_open += 1
            server.most_open = max(server.most_open, server.num_open)
        try:
            said = server.script(name, server.tries[name])
        finally:
            with server.lock:
                server.num_open -= 1
        if said is None:
            self.close_connection = True
        else:
            self._send(said[0], {"of": name, "usage": {"completion_tokens": 2}}, said[1])

    def log_message(self, *args: object) -> None:
        pass

    def _send(self, status: int, content: dict[str, Any], headers: dict[str, str]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data)), "X-Request-ID": "r7"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def well(*_: object) -> tuple[int, dict[str, str]]:
    return 200, {}


@contextmanager
def answering(script: Script = well) -> Iterator[Answering]:
    with Answering(script) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def line(name: str, **more: Any) -> str:
    given = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": name}}
    return json.dumps(given | more)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "input.jsonl"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "output.jsonl"


@pytest.fixture(autouse=True)
def _without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "RETRY_S", 0.01)


def run(server: Answering, source: Path, target: Path, in_flight: int | None = None) -> int:
    """In this process. Returns the number of errors."""
    one = Batch(source, Output(target))
    asyncio.run(one.run(server.url, None, in_flight))
    return one.progress.num_errors


def answers(target: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in target.read_text().splitlines()]


def statuses(target: Path) -> dict[str, Any]:
    """By custom_id, the status or the error's code."""
    found = answers(target)
    by_id = {
        each["custom_id"]: each["response"]["status_code"] if each["response"] else each["error"]["code"]
        for each in found
    }
    assert len(by_id) == len(found), "a line has two answers"
    return by_id


def test_each_line_is_asked_once_with_the_lowest_priority_and_a_seed_of_its_own(source: Path, target: Path) -> None:
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    lines = [line(f"q{i}", url=paths[i % 4]) for i in range(9)]
    source.write_text("\n".join([*lines, "", line("own", body={"prompt": "own", "priority": 3, "seed": 5})]))
    with answering() as server:
        assert run(server, source, target) == 0
    assert statuses(target) == {**{f"q{i}": 200 for i in range(9)}, "own": 200}
    assert set(server.tries.values()) == {1}
    first = next(each for each in answers(target) if each["custom_id"] == "q1")
    assert first == {
        "id": "batch_req_r7",
        "custom_id": "q1",
        "response": {"status_code": 200, "request_id": "r7", "body": {"of": "q1", "usage": {"completion_tokens": 2}}},
        "error": None,
    }
    assert [server.bodies[f"q{i}"][0] for i in range(4)] == paths
    sent = [server.bodies[f"q{i}"][1] for i in range(9)]
    assert {each["priority"] for each in sent} == {MAX_PRIORITY} and len({each["seed"] for each in sent}) == 9
    assert server.bodies["own"][1] == {"prompt": "own", "priority": 3, "seed": 5}


def test_as_many_requests_are_open_as_keep_the_models_engines_busy(source: Path, target: Path) -> None:
    source.write_text("\n".join(line(f"q{i}") for i in range(2 * IN_FLIGHT)))
    full = threading.Barrier(IN_FLIGHT)

    def together(name: str, number: int) -> tuple[int, dict[str, str]]:
        full.wait(60)  # breaks where fewer come
        return 200, {}

    with answering(together) as server:
        run(server, source, target)
        assert server.most_open == IN_FLIGHT
    target.unlink()
    with answering() as server:
        run(server, source, target, in_flight=1)
        assert server.most_open == 1


def test_lines_that_cannot_be_asked_are_errors_and_stop_nothing(source: Path, target: Path) -> None:
    wrong = {
        "torn": '{"custom_id": "x", "meth',
        "list": "[]",
        "deep": "[" * 100_000,
        "bytes": b"\xff\xfe".decode("latin-1"),
        "unnamed": line("q", custom_id=7),
        "unknown url": line("u", url="/v1/rerank"),
        "method": line("m", method="GET"),
        "body": line("b", body="text"),
        "stream": line("s", body={"prompt": "s", "stream": True}),
        "twice": line("good"),
    }
    source.write_text("\n".join([line("good"), *wrong.values(), line("last")]), encoding="latin-1")
    with answering() as server:
        assert run(server, source, target) == len(wrong)
        assert set(server.tries) == {"good", "last"}
        found = answers(target)
        # A restart asks for nothing, and does not write them twice.
        assert run(server, source, target) == len(wrong)
        assert set(server.tries.values()) == {1}
    assert sorted(map(str, (each["custom_id"] for each in answers(target)))) == sorted(
        map(str, (each["custom_id"] for each in found))
    )
    errors = [each for each in found if each["response"] is None]
    assert {each["error"]["code"] for each in errors} == {"invalid_line"}
    assert [each["custom_id"] for each in errors] == [None] * 5 + ["u", "m", "b", "s", "good"]
    assert "line 7: method and url" in errors[5]["error"]["message"]


def test_a_busy_or_broken_server_is_asked_again(source: Path, target: Path) -> None:
    source.write_text("\n".join(line(name) for name in ("busy", "breaks", "away", "late", "good")))
    soon = {"Retry-After": "0"}
    first = {"busy": (429, soon), "away": (503, soon), "breaks": None, "late": (502, {"Retry-After": "0.01"})}

    def script(name: str, number: int) -> tuple[int, dict[str, str]] | None:
        return first[name] if name in first and number < 3 else (200, {})

    with answering(script) as server:
        assert run(server, source, target) == 0
    assert server.tries == {"busy": 3, "breaks": 3, "away": 3, "late": 3, "good": 1}


def test_refusals_are_answers_and_a_restart_repeats_only_failures_of_the_server(source: Path, target: Path) -> None:
    source.write_text("\n".join(line(name) for name in ("404", "500", "503", "breaks", "200")))

    def script(name: str, number: int) -> tuple[int, dict[str, str]] | None:
        return None if name == "breaks" else (int(name), {})

    with answering(script) as server:
        assert run(server, source, target) == 4
    assert statuses(target) == {"404": 404, "500": 500, "503": 503, "breaks": "no_answer", "200": 200}
    assert server.tries["breaks"] == batch.MAX_BROKEN
    with answering() as server:
        assert run(server, source, target) == 1  # the 404 is an answer
    assert set(server.tries) == {"500", "503", "breaks"}
    assert statuses(target) == {"404": 404, "500": 200, "503": 200, "breaks": 200, "200": 200}


def test_a_server_that_answers_nothing_ends_the_run(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text("\n".join(line(f"q{i}") for i in range(9)))
    monkeypatch.setattr(batch, "PATIENCE_S", 0.05)
    with (
        answering(lambda *_: (503, {"Retry-After": "0.02"})) as server,
        pytest.raises(ExceptionGroup) as raised,
    ):
        run(server, source, target)
    assert raised.value.split(ApiError)[1] is None, "of each worker that had no answer, at least of one"
    assert answers(target) == []


def test_one_line_that_a_server_never_takes_stops_no_other(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text("\n".join(line(name) for name in ("never", "later", "good")))
    monkeypatch.setattr(batch, "PATIENCE_S", 0.5)
    turned_away = 503, {"Retry-After": "0.1"}

    def script(name: str, number: int) -> tuple[int, dict[str, str]]:
        return turned_away if name == "never" or (name == "later" and number < 3) else (200, {})

    with answering(script) as server:
        assert run(server, source, target, in_flight=3) == 1
    assert statuses(target) == {"never": "no_answer", "later": 200, "good": 200}
    assert server.tries == {"never": 5, "later": 3, "good": 1}


def test_a_server_that_others_use_is_waited_for_without_a_limit(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text(line("q"))
    monkeypatch.setattr(batch, "PATIENCE_S", 0.05)
    with answering(lambda _, number: (429, {"Retry-After": "0.02"}) if number < 9 else (200, {})) as server:
        assert run(server, source, target) == 0
        assert server.tries["q"] == 9


def test_a_line_torn_by_a_kill_is_cut_off_and_asked_again(source: Path, target: Path) -> None:
    source.write_text("\n".join(line(f"q{i}") for i in range(3)))
    with answering() as server:
        run(server, source, target)
        whole = target.read_bytes()
        for left in (len(whole) - 9, whole[:-1].rindex(b"\n") + 5):
            target.write_bytes(whole[:left])
            run(server, source, target)
        assert sorted(server.tries.values()) == [1, 1, 3]
    assert statuses(target) == {f"q{i}": 200 for i in range(3)}
    assert list(target.parent.glob("*.kept")) == []


@pytest.mark.parametrize(
    "content",
    ["some notes\n", "some notes", line("q") + "\n", "[1]\n", "{}\n", '{"custom_id": 1, "response": 1, "error": 1}\n'],
)
def test_another_file_is_refused_and_stays(source: Path, target: Path, content: str) -> None:
    source.write_text(line("q"))
    target.write_text(content)
    done = CliRunner().invoke(app, ["batch", str(source), "-o", str(target), "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 2 and "line 1, is no answer of a batch" in done.output
    assert target.read_text() == content and list(target.parent.glob("*.kept")) == []


def test_two_runs_do_not_write_one_file(target: Path) -> None:
    first = Output(target)
    with pytest.raises(ValueError, match="written by another run"):
        Output(target)
    first.write("q", None, {"code": "x", "message": ""})
    assert [each["custom_id"] for each in answers(target)] == ["q"]


def test_bodies_are_not_held_in_memory(source: Path, target: Path) -> None:
    """With Python's own garbage collection, because httpx's objects refer to one another."""
    with source.open("w") as lines:
        for i in range(200):
            lines.write(line(f"q{i}", body={"prompt": f"q{i}", "of": "x" * 100_000}) + "\n")
    with answering() as server:
        server.keeps_bodies = False
        rare = gc.get_threshold()
        gc.set_threshold(700, 10, 10)
        tracemalloc.start()
        try:
            run(server, source, target, in_flight=2)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            gc.set_threshold(*rare)
    assert len(answers(target)) == 200 and peak < source.stat().st_size / 3


def command(source: Path, target: Path, url: str) -> "subprocess.Popen[str]":
    words = ["batch", str(source), "-o", str(target), "--url", url]
    return subprocess.Popen(
        [sys.executable, "-m", "cli", *words], cwd=REPOSITORY, env=environment(), stderr=subprocess.PIPE, text=True
    )


def test_a_client_killed_at_any_moment_goes_on_and_computes_nothing_twice(source: Path, target: Path) -> None:
    source.write_text("\n".join(line(f"q{i}") for i in range(400)))
    draw, num_kills = random.Random(5), 3

    def slow(*_: object) -> tuple[int, dict[str, str]]:
        time.sleep(0.005)
        return 200, {}

    with answering(slow) as server:
        for kill in range(num_kills):
            killed = command(source, target, server.url)
            wait_until(
                "it answers", partial(lambda least: server.tries.total() > least, 100 * kill + draw.randrange(20, 100))
            )
            time.sleep(draw.random() / 100)
            killed.kill()
            killed.communicate()
        last = command(source, target, server.url)
        said = last.communicate()[1]
        assert last.returncode == 0, said
        assert "400/400" in said
        assert server.tries.total() <= 400 + num_kills * IN_FLIGHT
    assert statuses(target) == {f"q{i}": 200 for i in range(400)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_whole_answers(source: Path, target: Path, number: signal.Signals) -> None:
    source.write_text("\n".join(line(f"q{i}") for i in range(20)))
    ended = threading.Event()

    def script(name: str, _: int) -> tuple[int, dict[str, str]]:
        if int(name[1:]) >= 2:
            ended.wait(60)
        return 200, {}

    with answering(script) as server:
        running = command(source, target, server.url)
        wait_until("it waits", lambda: server.num_open == IN_FLIGHT and target.exists() and target.stat().st_size > 0)
        running.send_signal(number)
        said = running.communicate(timeout=60)[1]
        ended.set()
    assert running.returncode == batch.INTERRUPTED and "Traceback" not in said, said
    assert set(statuses(target).values()) == {200}


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("", 2, "give either MODEL or --url URL"),
        ("demo --url http://127.0.0.1:1", 2, "give either MODEL or --url URL"),
        ("/absent/model", 2, "'/absent/model' does not exist"),
        ("--url nonsense", 2, "the URL must be like"),
        ("--url http://127.0.0.1:9", 1, "cannot be reached"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(source: Path, target: Path, words: str, status: int, says: str) -> None:
    source.write_text(line("q"))
    done = llama_ray("batch", str(source), "-o", str(target), *words.split())
    assert done.returncode == status and says in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr


def test_the_key_is_sent_and_a_refused_one_ends_the_run(source: Path, target: Path) -> None:
    source.write_text(line("q"))
    with answering() as server:
        done = llama_ray("batch", str(source), "-o", str(target), "--url", server.url, env={"OPENAI_API_KEY": "k1"})
        assert done.returncode == 0 and server.keys == {"Bearer k1"}
        assert "1/1" in done.stderr and "0 errors" in done.stderr


def test_a_server_of_its_own_that_cannot_start_says_why(source: Path, target: Path, tmp_path: Path) -> None:
    source.write_text(line("q"))
    (tmp_path / "empty").mkdir()
    done = llama_ray("batch", str(source), "-o", str(target), str(tmp_path / "empty"))
    assert done.returncode == 1 and "the server has ended" in done.stderr and "empty" in done.stderr
