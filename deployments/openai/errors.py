"""HTTP errors: turns exceptions into answers in OpenAI's shape, {"error": {message, type, param, code}}, or, at the routes of
Anthropic's API, in that API's: {"type": "error", "error": {type, message}, "request_id"}.

Decides status, type and Retry-After by one table. Messages are the exceptions' own and never repeat the caller's input.
"""

import logging
import math
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from llama_core.errors import (
    CallersDeadlineExceeded,
    CheckpointChanged,
    DeadlineExceeded,
    InvalidRequest,
    LlamaError,
    NotReady,
    PoisonRequest,
    QueueFull,
    RankFailure,
    RequestAborted,
    RequestCancelled,
)


class InvalidJson(InvalidRequest):
    code = "invalid_json"


class IncompleteBody(InvalidRequest):
    code = "incomplete_body"


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"


class BodyTimeout(InvalidRequest):
    code = "body_timeout"


class UnsupportedMediaType(InvalidRequest):
    code = "unsupported_media_type"


class Unsupported(InvalidRequest):
    """A known field with a value that would change the answer, and that this server does not support."""

    code = "unsupported"


class Unauthorized(InvalidRequest):
    code = "invalid_api_key"


class HostNotAllowed(InvalidRequest):
    code = "host_not_allowed"


class AdminKeyRequired(InvalidRequest):
    code = "admin_key_required"


class ModelNotFound(InvalidRequest):
    code = "model_not_found"


class PreviousResponseNotFound(InvalidRequest):
    code = "previous_response_not_found"


class RouteNotFound(InvalidRequest):
    code = "not_found"


class IdempotencyKeyReused(InvalidRequest):
    code = "idempotency_key_reused"


class StreamTakenOver(RequestCancelled):
    """Of a connection, because another one with the same Idempotency-Key reads its stream now."""

    code = "stream_taken_over"


class AnswerChanged(InvalidRequest):
    """The rest of an answer is asked for, and the same request has another answer now."""

    code = "answer_changed"


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"


# By status; the most specific class of an error decides.
_ERRORS: dict[int, tuple[type[LlamaError], ...]] = {
    400: (InvalidRequest,),
    401: (Unauthorized,),
    403: (HostNotAllowed, AdminKeyRequired),
    404: (ModelNotFound, PreviousResponseNotFound, RouteNotFound),
    405: (MethodNotAllowed,),
    408: (BodyTimeout,),
    409: (StreamTakenOver, AnswerChanged),
    413: (BodyTooLarge,),
    415: (UnsupportedMediaType,),
    422: (IdempotencyKeyReused,),
    429: (QueueFull,),
    500: (LlamaError,),
    503: (NotReady, RankFailure, CheckpointChanged, RequestCancelled),
    504: (DeadlineExceeded,),
}
STATUS = {kind: status for status, kinds in _ERRORS.items() for kind in kinds}
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}  # any other status: invalid_request_error
ANTHROPIC_PREFIX = "/v1/messages"  # of the paths of Anthropic's API
ANTHROPIC_TYPES = TYPES | {404: "not_found_error", 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
RANK_FAILURE_RETRY_S = 5.0  # about the recovery time of a small group of ranks
INTERNAL = LlamaError("The server failed to answer this request; its log has the cause under the request's id.")


def status_of(error: LlamaError) -> int:
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def log_level(error: LlamaError) -> int:
    """Of a request's line in the log: ERROR where the server failed, INFO where the caller decided how the request ends."""
    is_callers = status_of(error) < 500 or isinstance(error, CallersDeadlineExceeded)
    return logging.INFO if is_callers else logging.ERROR


def as_llama_error(error: BaseException) -> LlamaError:
    """The error itself if it is a LlamaError, else INTERNAL, which reveals nothing about the cause."""
    return error if isinstance(error, LlamaError) else INTERNAL


def exception_response(error: Exception, scope: Scope) -> Response:
    """The answer to an exception of an endpoint or of the router."""
    if not isinstance(error, HTTPException):
        return error_response(as_llama_error(error), scope)
    if error.status_code == 405:
        headers = dict(error.headers or {})
        refusal = MethodNotAllowed(f"This route does not take this method, only {headers.get('Allow', '')}.")
        return error_response(refusal, scope, headers)
    return error_response(InvalidJson("The request could not be read."), scope)


def error_object(error: LlamaError) -> dict[str, dict[str, str | None]]:
    kind = TYPES.get(status_of(error), "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_error_object(error: LlamaError, request_id: str) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(status_of(error), "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def route_path(scope: Scope) -> str:
    """The path of a request without the prefix under which the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is to a path of Anthropic's API, also to one that does not exist."""
    return route_path(scope).startswith(ANTHROPIC_PREFIX)


def retry_after_s(error: LlamaError) -> int | None:
    """Whole seconds, at least 1; None if a retry will not help."""
    if isinstance(error, QueueFull | NotReady):
        return max(1, math.ceil(error.retry_after_s))
    return math.ceil(RANK_FAILURE_RETRY_S) if isinstance(error, RankFailure | CheckpointChanged) else None


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_response(error: LlamaError, scope: Scope, headers: dict[str, str] | None = None) -> Response:
    """The answer to a request that failed, in the shape of the API of its path."""
    retry = retry_after_s(error)
    extra = {} if retry is None else {"Retry-After": str(retry)}
    if isinstance(error, PoisonRequest | DeadlineExceeded | RequestAborted | StreamTakenOver | AnswerChanged):
        extra["x-should-retry"] = "false"  # OpenAI's clients retry a 5xx and a 409 without this header
    body = anthropic_error_object(error, scope["state"]["request_id"]) if is_anthropic(scope) else error_object(error)
    return json_response(body, status_of(error), {**(headers or {}), **extra})
