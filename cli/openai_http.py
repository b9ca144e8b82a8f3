"""A small client of OpenAI's HTTP API over the standard library: JSON requests, and streams of server-sent events."""

import http.client
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any, Final
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S: Final = 600.0  # also the longest silence within an answer

_NOT_IN_URLS: Final = re.compile(r"[\x00-\x20\x7f]")


class ApiError(Exception):
    """The server refused or broke off a request, or cannot be reached. The text is for the terminal."""


def api_base(url: str) -> str:
    """The URL up to and with /v1. Raises ApiError for what is no HTTP URL; a word alone is none either."""
    is_word = url != "localhost" and not re.search("[.:/]", url)
    url = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        path = parts.path.rstrip("/").encode("ascii").decode()
    except ValueError:  # UnicodeError too
        host = b""
    if is_word or not host or parts.scheme not in ("http", "https") or _NOT_IN_URLS.search(url):
        raise ApiError("the URL must be like http://127.0.0.1:8000")
    try:
        parts.port  # noqa: B018  raises ValueError
    except ValueError:
        raise ApiError("the URL has no valid port") from None
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else path + '/v1'}"


def _error_text(status: int, body: bytes) -> str:
    """The message in an error of OpenAI's shape, or the beginning of another body."""
    with suppress(ValueError):
        error = json.loads(body).get("error")
        if isinstance(error, dict) and error.get("message"):
            return f"HTTP {status}: {error['message']}"
    return f"HTTP {status}: {body[:200].decode(errors='replace').strip()}"


def _read_event(line: bytes) -> dict[str, Any] | None:
    """The chunk in a line of a stream; {} for the end `[DONE]`, None for a line without data. Raises ApiError for an error in
    the stream."""
    if not line.startswith(b"data:"):
        return None
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        return {}
    try:
        chunk = json.loads(data)
    except ValueError:
        raise ApiError("the server sent an event that is not JSON") from None
    if not isinstance(chunk, dict):
        raise ApiError("the server sent an event that is not an object")
    if error := chunk.get("error"):
        raise ApiError(str(error.get("message", error) if isinstance(error, dict) else error))
    return chunk


class OpenAIHttp:
    """One server. Each request has a connection of its own, so that closing it cancels the request."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.base = api_base(url)
        # Servers without keys accept any.
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key or 'none'}"}

    def first_model(self) -> str:
        """The name of the first model that the server lists. Raises ApiError."""
        connection, response = self._send("GET", "/models")
        with closing(connection):
            try:
                models = json.loads(response.read())["data"]
                return str(models[0]["id"])
            except (ValueError, RecursionError, LookupError, TypeError):
                raise ApiError("the server lists no model: is it OpenAI-compatible? Give --model") from None

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer until `[DONE]`. Raises ApiError, also if the stream breaks off. Closing the iterator
        cancels the request."""
        connection, response = self._send("POST", path, {**body, "stream": True})
        with closing(connection):
            while True:
                try:
                    line = response.readline()
                except (OSError, http.client.HTTPException) as error:
                    raise ApiError(f"the connection broke: {error or type(error).__name__}") from None
                if not line:
                    raise ApiError("the stream ended without [DONE]")
                chunk = _read_event(line)
                if chunk == {}:
                    return
                if chunk is not None:
                    yield chunk

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        parts = urlsplit(self.base)
        assert parts.hostname is not None
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=CONNECT_TIMEOUT_S)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, parts.path + path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ApiError(_error_text(response.status, response.read()))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ApiError(f"{self.base} cannot be reached: {error}. Is the server running? Set --url.") from None
        except BaseException:
            connection.close()
            raise
        return connection, response
