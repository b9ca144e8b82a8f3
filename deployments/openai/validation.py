"""Checks a body's fields against its class. Errors name the field, and repeat nothing of the request."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from llama_core.errors import InvalidDialog, InvalidParameter, InvalidRequest

KIND_MARK = "#"  # begins the names of the kinds of a union, which are no part of a field's place

BodyT = TypeVar("BodyT", bound=BaseModel)

REASONS = {
    # Own messages for pydantic's error types, because its messages may quote the input.
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_too_long": "must have at most {max_length} characters",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "finite_number": "must be finite",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "literal_error": "must be one of {expected}",
    "union": "must be {types}",
}

# pydantic's names of the types of a union, which end the place of each of its errors.
OBJECT = "dict[str,any]"  # a part of each of our unions
UNION_TYPES = {"str": "a string", "bool": "true or false", OBJECT: "an object"}
# By the field that makes a prompt, the route that takes it.
ROUTES = {
    "messages": "messages go to /v1/chat/completions",
    "prompt": "a prompt goes to /v1/completions",
    "input": "input goes to /v1/responses",
}


def validate(kind: type[BodyT], raw: dict[str, Any]) -> BodyT:
    """`raw` as a `kind`. Raises InvalidParameter for its first bad field, InvalidDialog where that is a message's."""
    present = {name: value for name, value in raw.items() if value is not None}
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        # Kept in no local: an error of our own validators holds this frame, and so the body.
        raise _refusal(kind, error, present) from None


def _refusal(kind: type[BaseModel], error: ValidationError, given: Mapping[str, Any]) -> InvalidRequest:
    details = _first(error.errors(include_url=False))  # answers quote nothing of the inputs
    return _explain(details, _other_route(kind, details, given))


def _first(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first error. Those of a union are one, which names every type."""
    first, place = errors[0], errors[0]["loc"][:-1]
    same = [str(error["loc"][-1]) for error in errors if error["loc"] and error["loc"][:-1] == place]
    if len(same) < 2 or OBJECT not in same or not UNION_TYPES.keys() >= set(same):
        return first
    *others, last = (UNION_TYPES[name] for name in same)
    return {**first, "loc": place, "type": "union", "ctx": {"types": f"{', '.join(others)} or {last}"}}


def _other_route(kind: type[BaseModel], details: ErrorDetails, given: Mapping[str, Any]) -> str:
    """Where a body belongs that has another route's prompt instead of its own; "" for other errors."""
    if details["type"] != "missing" or details["loc"][0] not in ROUTES:
        return ""
    sent = next((name for name in ROUTES if name in given and name not in kind.model_fields), None)
    return f"; {ROUTES[sent]}" if sent is not None else ""


def _explain(details: ErrorDetails, hint: str) -> InvalidRequest:
    """hint: ends the message."""
    context = details.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, InvalidRequest) and not details["loc"]:
        # A contradiction between fields, or a field that the schema does not have: the message names it.
        return type(cause)(cause.message.removeprefix("."), param=cause.param and cause.param.removeprefix("."))
    param = ""
    for part in details["loc"]:
        if isinstance(part, str) and part.startswith(KIND_MARK):
            continue
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    if isinstance(cause, InvalidRequest):  # one of our own validators
        place, _, rest = cause.message.partition(": ")
        in_field = place.startswith(("[", ".")) and bool(rest)  # a place within the field
        param, reason = (param + place, rest) if in_field else (param, cause.message)
    elif details["type"] == "float_type" and type(details["input"]) is int:
        reason = "must be a number of at most 308 digits"
    else:
        reason = REASONS.get(details["type"], "is not valid").format(**context)
        reason = reason.replace("at least 1 items", "at least 1 item")
    message = f"{param}: {reason}{hint}"
    if isinstance(cause, InvalidRequest) and not isinstance(cause, InvalidParameter):
        return type(cause)(message, param=param)
    if param.startswith("messages"):
        index = next((part for part in details["loc"] if isinstance(part, int)), None)
        return InvalidDialog(message, index=index, param=param)
    return InvalidParameter(message, param=param)
