"""Bad inputs to a whole server: HAProxy or Serve's proxy, a replica, ranks. One for each place that refuses; test_bad_input.py
tests every refused value on the application alone.
"""

import asyncio
import json
import threading
from functools import partial
from typing import Any

import pytest

from tests.support.server import CHAT, COMPLETIONS, Answer, Server, ask, connect, is_idle, message
from tests.support.waiting import wait_until


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


def post(server: Server, body: dict[str, Any], *headers: str, path: str = COMPLETIONS) -> Answer:
    return asyncio.run(ask(server, message(path, body, *headers)))


def test_every_bad_input_gets_its_error_and_leaves_no_sequence(server: Server) -> None:
    cap = 16 * 2**20
    chunks = b"".join(b"100000\r\n" + b" " * 2**20 + b"\r\n" for _ in range(17))
    chunked = message(CHAT, b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
    cases = [
        (message(COMPLETIONS, b""), 400, "invalid_json"),
        (message(CHAT, b"[" * 100_000), 400, "invalid_json"),
        (message(COMPLETIONS, {"prompt": "x", "stop": "x" * 2**20}), 400, "invalid_parameter"),
        (message(COMPLETIONS, {"prompt": [5] * 5000}), 400, "context_length_exceeded"),
        (message(CHAT, {"messages": []}), 400, "invalid_dialog"),
        (message(COMPLETIONS, {"prompt": "x"}, "Content-Type: text/plain"), 415, "unsupported_media_type"),
        (message(COMPLETIONS, {"prompt": "x", "model": "gpt-9"}), 404, "model_not_found"),
        (message(COMPLETIONS, {"prompt": [10**6]}), 400, "invalid_parameter"),
        (message(COMPLETIONS, b"{", length=cap + 1), 413, "body_too_large"),
        (chunked + chunks, 413, "body_too_large"),
        (get("/v2/nothing"), 404, "not_found"),
        (get(CHAT), 405, "method_not_allowed"),
    ]

    async def ask_all() -> list[Answer]:
        return [await ask(server, request) for request, _, _ in cases]

    def figures() -> tuple[object, object]:
        props = server.get("/props")[1]
        return props["blocks_used"], [rank["pid"] for rank in props["ranks"]]

    wait_until("the server is idle", lambda: is_idle(server))
    before = figures()
    for (request, status, code), answer in zip(cases, asyncio.run(ask_all()), strict=True):
        assert (answer.status, answer.error()["code"]) == (status, code), (request[:200], answer.body[:300])
    assert post(server, {"prompt": "Are you there?", "max_tokens": 3}).status == 200
    wait_until("the server is idle", lambda: is_idle(server))
    assert figures() == before


@pytest.mark.parametrize(
    "body", [{"prompt": "hello " * 1_700_000}, {"prompt": ["x"] * 100_000}], ids=["10 MB", "100k texts"]
)
def test_a_huge_prompt_is_refused_while_health_checks_are_answered(server: Server, body: dict[str, Any]) -> None:
    statuses: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not (statuses and done.is_set()):
            statuses.append(server.get("/health")[0])

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        answer = post(server, body)
    finally:
        done.set()
        watching.join()
    assert answer.status == 400 and answer.error()["param"] == "prompt"
    assert set(statuses) == {200}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_deadline_ends_a_request_with_our_error(server: Server, stream: bool) -> None:
    """Serve reads the same header and would answer in plain text or break the stream."""
    body = {"prompt": "Once", "n": 128, "max_tokens": 450, "ignore_eos": True, "temperature": 1.5, "stream": stream}
    # A busy machine may need longer for the first token of a stream, and answers 504 until then; or longer than the head start
    # before Serve's own timer, which is a quarter of the limit and at most 1 s.
    for seconds in (0.5, 1, 2, 4, 8, 16, 32):
        answer = post(server, body, f"X-Request-Timeout-Seconds: {seconds}")
        assert b"[DONE]" not in answer.body
        last = answer.body.strip().rpartition(b"\n\n")[2].removeprefix(b"data: ")
        is_ours = b"deadline_exceeded" in last
        if is_ours and (answer.status == 200 or not stream):
            break
    assert answer.status == (200 if stream else 504) and json.loads(last)["error"]["code"] == "deadline_exceeded"
    wait_until("the server is idle", lambda: is_idle(server))


def test_an_answer_for_http_1_0_has_a_length_and_closes_the_connection(server: Server) -> None:
    request = message(COMPLETIONS, {"prompt": "Once", "max_tokens": 3}).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    with connect(server) as connection:
        connection.sendall(request)
        answer = b"".join(iter(partial(connection.recv, 65536), b""))  # until the server closes
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and b"content-length: %d" % len(body) in head.lower()
    assert json.loads(body)["usage"]["completion_tokens"] == 3
