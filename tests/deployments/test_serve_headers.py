"""Headers that Serve would answer by itself reach our application instead, and nothing that Serve cannot read reaches Serve."""

import pytest
from ray._common.utils import import_attr
from starlette.middleware import Middleware
from starlette.types import Message, Receive, Scope, Send

from deployments.local.serve_run import SAFE_HEADERS
from deployments.serve_headers import MOVED_TIMEOUT_HEADER, SafeForServe


async def passed_on(*headers: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    seen: list[tuple[bytes, bytes]] = []

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])

    async def never() -> Message:
        raise AssertionError("nobody asks for the body")

    async def nobody(message: Message) -> None:
        raise AssertionError("nobody answers")

    given: Scope = {"type": "http", "headers": list(headers)}
    await SafeForServe(serve)(given, never, nobody)
    assert given["headers"] == list(headers), "the server's own scope is as it was"
    return seen


async def test_what_serve_has_no_interest_in_passes_as_it_is() -> None:
    headers = [(b"content-type", b"application/json"), (b"authorization", "Bearer schlüssel".encode()), (b"x", b"")]
    assert await passed_on(*headers) == headers


async def test_the_limit_of_time_passes_under_another_name() -> None:
    assert await passed_on((b"x-request-timeout-seconds", b"2.5")) == [(MOVED_TIMEOUT_HEADER.encode(), b"2.5")]


@pytest.mark.parametrize(
    "name", [b"x-request-disconnect-disabled", b"serve_multiplexed_model_id", b"traceparent", b"x"]
)
async def test_what_is_not_utf8_passes_as_utf8(name: bytes) -> None:
    assert await passed_on((name, b"caf\xe9")) == [(name, "café".encode())]


@pytest.mark.parametrize(
    ("given", "passed"), [(b"a b;c\td", b"abcd"), (b"a" * 5000, b"a" * 128), (b"ok-1", b"ok-1"), (b"\xff ok", b"ok")]
)
async def test_a_request_id_passes_without_what_could_confuse_a_log(given: bytes, passed: bytes) -> None:
    assert await passed_on((b"x-request-id", given)) == [(b"x-request-id", passed)]


def test_serve_finds_them_where_make_serve_says() -> None:
    made = import_attr(SAFE_HEADERS)()
    assert [type(middleware) for middleware in made] == [Middleware] and made[0].cls is SafeForServe
