"""Reads a request's body and makes a checked object of it, or says what is wrong without repeating any of it.

Raw bytes first, with a cap and a deadline, then strict JSON, then the schema. FastAPI's own parsing is not used: it
answers 500 to NaN, and takes bodies of any size.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from deployments.http.errors import BodyTimeout, BodyTooLarge, IncompleteBody, InvalidJson, UnsupportedMediaType
from llama_core.errors import InvalidDialog, InvalidParameter, InvalidRequest, QueueFull, RequestCancelled

MAX_BRACKETS = 200_000  # 16 MiB of "[],[]," would hold the event loop for a second; those inside strings count too
MAX_COMMAS = 1_000_000  # likewise: so many numbers keep the event loop for some 50 ms

BodyT = TypeVar("BodyT", bound=BaseModel)

REASONS = {
    # pydantic's error types, in words of our own: its messages may quote the input
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_too_long": "must have at most {max_length} characters",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "finite_number": "must be finite",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "literal_error": "must be one of {expected}",
}


@dataclass(frozen=True, slots=True)
class BodyLimits:
    max_bytes: int = 16 * 2**20
    timeout_s: float = 10.0  # from the first byte awaited to the last one received
    most_unfinished: int = 8  # so many bodies of max_bytes may be here before they are complete, or more smaller ones


class BodyReader:
    """Reads the bodies of one replica's requests, and knows how much of them is here while they are not complete."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self.num_unfinished_bytes = 0

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises an InvalidRequest when it is not JSON by its type, too large, too slow or cut short;
        QueueFull when so much of others is arriving that there is no room for it."""
        limits = self._limits
        _check_content_type(request.headers.get("content-type", ""))
        declared = _declared_length(request)
        if declared is not None and declared > limits.max_bytes:
            raise _too_large(limits)
        body = bytearray()
        try:
            async with asyncio.timeout(limits.timeout_s):
                async for chunk in request.stream():
                    is_more = bool(body and chunk)  # what comes in one piece is in nobody's way
                    body += chunk
                    self.num_unfinished_bytes += len(chunk)
                    if len(body) > limits.max_bytes:
                        raise _too_large(limits)
                    if is_more and self.num_unfinished_bytes > limits.most_unfinished * limits.max_bytes:
                        raise QueueFull("Too many large bodies are arriving at once.")
        except TimeoutError:
            if declared is not None:
                raise IncompleteBody(_mismatch(declared, len(body), f" within {limits.timeout_s:g} s")) from None
            raise BodyTimeout(f"The body did not arrive within {limits.timeout_s:g} s.") from None
        except ClientDisconnect:
            raise RequestCancelled("the client left before its request was complete") from None
        finally:
            self.num_unfinished_bytes -= len(body)
        if declared is not None and declared != len(body):
            raise IncompleteBody(_mismatch(declared, len(body)))
        return bytes(body)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body's object. Raises InvalidJson, also for NaN, lone surrogates, deep nesting and endless integers."""
    if raw.count(b"[") + raw.count(b"{") > MAX_BRACKETS:
        raise InvalidJson(f"The body has more than {MAX_BRACKETS} opening brackets, the most this server reads.")
    if raw.count(b",") > MAX_COMMAS:
        raise InvalidJson(f"The body has more than {MAX_COMMAS} commas, the most this server reads.")
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        at = re.search(r"at line \d+ column \d+$", str(error))  # jiter's message ends so and quotes no input
        raise InvalidJson(f"The body is not valid JSON{' ' + at[0] if at else ''}.") from None
    if not isinstance(value, dict):
        raise InvalidJson("The body must be a JSON object.")
    return value


def validate(kind: type[BodyT], raw: dict[str, Any]) -> BodyT:
    """`raw` as a `kind`. Raises InvalidParameter for its first bad field, InvalidDialog where that is a message's."""
    present = {name: value for name, value in raw.items() if value is not None}
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
    raise _explain(details)


def _explain(details: ErrorDetails) -> InvalidRequest:
    param = ""
    for part in details["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    context = details.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, InvalidRequest):  # one of our own validators
        reason = cause.message
    else:
        reason = REASONS.get(details["type"], "is not valid").format(**context)
    message = f"{param}: {reason}"
    if isinstance(cause, InvalidRequest) and not isinstance(cause, InvalidParameter):
        return type(cause)(message, param=param)
    if param.startswith("messages"):
        index = next((part for part in details["loc"] if isinstance(part, int)), None)
        return InvalidDialog(message, index=index, param=param)
    return InvalidParameter(message, param=param)


def _check_content_type(content_type: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType("The body must be JSON: send it with Content-Type: application/json.")


def _declared_length(request: Request) -> int | None:
    declared = request.headers.get("content-length")
    if declared is None:
        return None
    if not (declared.isascii() and declared.isdigit() and len(declared) < 19):
        raise IncompleteBody("Content-Length must be a number of bytes.")
    return int(declared)


def _too_large(limits: BodyLimits) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limits.max_bytes} bytes, the most this server reads.")


def _mismatch(declared: int, received: int, when: str = "") -> str:
    return f"Content-Length says {declared} bytes, {received} arrived{when}."
