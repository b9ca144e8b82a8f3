"""`llama-ray capture`: sends a request to a server that stores it, and keeps the stored file here."""

import json
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from cli.openai_http import ApiError, OpenAIHttp
from llama_core.sizes import parse_size

ROUTES: Final = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/responses",
}
"""The route of a body that has this field, where none is given."""


class BadRequestFile(Exception):
    """An argument of the command is wrong, or its file. The text is for the terminal."""


class UnwritableFile(Exception):
    """The text is for the terminal."""


def run(
    url: str,
    api_key: str | None,
    request: Path | None,
    question: str | None,
    prompt: str | None,
    fields: Sequence[str],
    route: str | None,
    output: Path | None,
) -> int:
    """Prints the name of the file. Returns 1 if the request failed, 2 for wrong arguments."""
    try:
        body = body_of(request, question, prompt, fields)
        capture = captured(OpenAIHttp(url, api_key), route or route_of(body), body)
        path = output or Path(f"{capture['request_id']}.json")
        write(path, capture)
    except (ApiError, BadRequestFile, UnwritableFile) as error:
        print(f"capture: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadRequestFile) else 1
    for choice in capture["choices"]:
        print(choice["text"], file=sys.stderr)
    print(path)
    return 0


def body_of(request: Path | None, question: str | None, prompt: str | None, fields: Sequence[str]) -> dict[str, Any]:
    """The body: of a file (- is stdin), or of a question or a prompt, with further fields. Raises BadRequestFile."""
    if sum(given is not None for given in (request, question, prompt)) != 1:
        raise BadRequestFile("give a request file, -q TEXT or --prompt TEXT, and only one of them")
    body: Any
    if request is not None:
        body = read_object(request)
    elif question is not None:
        body = {"messages": [{"role": "user", "content": question}]}
    else:
        body = {"prompt": prompt}
    for field in fields:
        name, equals, value = field.partition("=")
        if not (name and equals):
            raise BadRequestFile("--set needs NAME=VALUE, such as --set max_tokens=20")
        body[name] = _value_of(name, value)
    return dict(body)


def _value_of(name: str, text: str) -> Any:
    """JSON, a number of tokens with a unit such as 1k, or else the text itself."""
    with suppress(ValueError):
        return json.loads(text)
    if name.endswith("_tokens"):
        with suppress(ValueError):
            return parse_size(text)
    return text


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, - is stdin. Raises BadRequestFile."""
    try:
        found = json.loads(sys.stdin.read() if str(path) == "-" else path.read_text())
    except OSError as error:
        raise BadRequestFile(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise BadRequestFile(f"{path} is not JSON") from None
    except RecursionError:
        raise BadRequestFile(f"{path} is nested too deep") from None
    if not isinstance(found, dict):
        raise BadRequestFile(f"{path} is not a JSON object")
    return found


def route_of(body: Mapping[str, Any]) -> str:
    """Raises BadRequestFile for a body of which the route cannot be told."""
    found = next((route for field, route in ROUTES.items() if field in body), None)
    if found is None:
        raise BadRequestFile("the request has neither messages nor prompt nor input: give --route")
    return found


def captured(http: OpenAIHttp, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request, and fetch what the server stored of it. Raises ApiError, or BadRequestFile for a body nested too deep."""
    request_id = f"capture-{uuid.uuid4().hex}"
    try:
        http.whole(route, body, **{"X-Capture": "1", "X-Request-ID": request_id})
    except RecursionError:
        raise BadRequestFile("the request's body is nested too deep") from None
    return http.json(f"/captures/{quote(request_id)}")


def write(path: Path, capture: Mapping[str, Any]) -> None:
    """A file that only this user can read. Raises UnwritableFile."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)
            json.dump(capture, file, indent=1, ensure_ascii=False)
            file.write("\n")
    except OSError as error:
        raise UnwritableFile(f"{path} cannot be written: {error.strerror}") from None
