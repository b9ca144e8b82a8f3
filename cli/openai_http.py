"""A client of OpenAI's HTTP API: JSON requests, and streams of server-sent events."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import httpx

TIMEOUT_S: Final = 600.0  # to connect, and the longest silence within an answer


class ApiError(Exception):
    """The server refused or broke off a request, or cannot be reached. The text is for the terminal."""


def api_base(text: str) -> str:
    """The URL up to and with /v1. Raises ApiError for what is no HTTP URL; a word alone is none either."""
    is_word = text != "localhost" and not any(mark in text for mark in ".:/")
    with suppress(httpx.InvalidURL):
        url = httpx.URL(text if "://" in text else f"http://{text}")
        if url.host and url.scheme in ("http", "https") and (url.port or 1) < 2**16 and not is_word:
            return str(url.copy_with(path=url.path.rstrip("/").removesuffix("/v1") + "/v1"))
    raise ApiError("the URL must be like http://127.0.0.1:8000")


class OpenAIHttp:
    """One server. Closing a stream closes its connection, which cancels the request."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.base = api_base(url)
        headers = {"Authorization": f"Bearer {api_key or 'none'}"}  # servers without keys accept any
        self._client = httpx.Client(base_url=self.base, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def first_model(self) -> str:
        """The name of the first model that the server lists. Raises ApiError."""
        with self._sent("GET", "/models") as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, RecursionError, LookupError, TypeError):
                raise ApiError("the server lists no model: is it OpenAI-compatible? Give --model") from None

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer until `[DONE]`. Raises ApiError, also if the stream breaks off."""
        with self._sent("POST", path, {**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data:"):
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield _chunk(data)
        raise ApiError("the stream ended without [DONE]")

    @contextmanager
    def _sent(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Iterator[httpx.Response]:
        is_answered = False
        try:
            with self._client.stream(method, path, json=body) as response:
                is_answered = True
                if response.status_code != 200:
                    raise ApiError(error_text(response.status_code, response.read()))
                yield response
        except httpx.HTTPError as error:
            if is_answered:
                raise ApiError(f"the connection broke: {error or type(error).__name__}") from None
            raise ApiError(f"{self.base} cannot be reached: {error}. Is the server running? Set --url.") from None


def error_text(status: int, body: bytes) -> str:
    """The message in an error of OpenAI's shape, or the beginning of another body."""
    with suppress(ValueError):
        error = json.loads(body).get("error")
        if isinstance(error, dict) and error.get("message"):
            return f"HTTP {status}: {error['message']}"
    return f"HTTP {status}: {body[:200].decode(errors='replace').strip()}"


def _chunk(data: str) -> dict[str, Any]:
    """Raises ApiError for an error in the stream."""
    try:
        chunk = json.loads(data)
    except ValueError:
        raise ApiError("the server sent an event that is not JSON") from None
    if not isinstance(chunk, dict):
        raise ApiError("the server sent an event that is not an object")
    if error := chunk.get("error"):
        raise ApiError(str(error.get("message", error) if isinstance(error, dict) else error))
    return chunk
