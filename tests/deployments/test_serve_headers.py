"""Headers that Serve would answer by itself reach the application, and Serve gets no header that it cannot read."""

import pytest
from ray._common.utils import import_attr
from starlette.middleware import Middleware
from starlette.types import Message, Receive, Scope, Send

from deployments.http.request_id import MOVED_TIMEOUT_HEADER
from deployments.local.serve_run import SAFE_HEADERS
from deployments.serve_headers import SafeForServe


async def passed_on(*headers: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    seen: list[tuple[bytes, bytes]] = []

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])

    async def never() -> Message:
        raise AssertionError("the body is read")

    async def unused_send(message: Message) -> None:
        raise AssertionError("an answer is sent")

    given: Scope = {"type": "http", "headers": list(headers)}
    await SafeForServe(serve)(given, never, unused_send)
    assert given["headers"] == list(headers), "the server's own scope is unchanged"
    return seen


async def test_headers_that_serve_does_not_read_pass_unchanged() -> None:
    headers = [(b"content-type", b"application/json"), (b"authorization", "Bearer schlüssel".encode()), (b"x", b"")]
    assert await passed_on(*headers) == headers


async def test_the_request_timeout_passes_under_another_name() -> None:
    assert await passed_on((b"x-request-timeout-seconds", b"2.5")) == [(MOVED_TIMEOUT_HEADER.encode(), b"2.5")]


@pytest.mark.parametrize(
    "name", [b"x-request-disconnect-disabled", b"serve_multiplexed_model_id", b"traceparent", b"x"]
)
async def test_a_value_that_is_not_utf8_passes_as_utf8(name: bytes) -> None:
    assert await passed_on((name, b"caf\xe9")) == [(name, "café".encode())]


@pytest.mark.parametrize(
    ("given", "passed"), [(b"a b;c\td", b"abcd"), (b"a" * 5000, b"a" * 128), (b"ok-1", b"ok-1"), (b"\xff ok", b"ok")]
)
async def test_a_request_id_passes_without_characters_that_could_forge_a_log_line(given: bytes, passed: bytes) -> None:
    assert await passed_on((b"x-request-id", given)) == [(b"x-request-id", passed)]


def test_serve_finds_the_middlewares_at_the_configured_path() -> None:
    made = import_attr(SAFE_HEADERS)()
    assert [type(middleware) for middleware in made] == [Middleware] and made[0].cls is SafeForServe
