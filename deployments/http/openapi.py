"""Generates the OpenAPI document of a list of routes from the types of their bodies and answers."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from deployments.http.routing import Access, ApiRoute
from deployments.openai.answers.schemas import AnthropicError, Error
from deployments.openai.errors import ANTHROPIC_PREFIX

TITLE, VERSION = "Llama on Ray", "1"
DESCRIPTION = "OpenAI's completions, chat completions and responses, and Anthropic's messages."
# No type: some programs compare the text of all events with it, some each event as an object.
_EVENTS = {"description": "server-sent events"}
_REF = "#/components/schemas/{model}"
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
# Without configured keys, no key is needed.
_ANY_KEY: list[dict[str, list[str]]] = [{"bearer": []}, {"x-api-key": []}, {}]
_ERRORS = {
    400: "The request is not valid",
    401: "A valid API key is required",
    403: "The Host header has a name that is not allowed, or the key is not an admin key",
    404: "There is no such model",
    408: "The body did not arrive in time",
    409: "Another connection has taken over the stream of this Idempotency-Key",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "The Idempotency-Key was used with another body",
    429: "The queue is full; Retry-After has the time to try again",
    500: "The request failed",
    503: "The server is loading, draining or recovering; Retry-After has the time to try again",
    504: "The request's time limit has passed",
}


Schemas = Mapping[Any, dict[str, Any]]  # by type


def openapi_document(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of all routes that have a tag."""
    shown = [route for route in routes if route.include_in_schema]
    bodies = {route.body for route in shown if route.body is not None}
    answers = {Error, AnthropicError, *(route.answer for route in shown)}
    kinds: list[type] = sorted({*bodies, *answers}, key=lambda kind: kind.__name__)
    typed: list[tuple[type, JsonSchemaMode, TypeAdapter[Any]]] = [
        (kind, "validation", TypeAdapter(kind)) for kind in kinds
    ]
    made, defined = TypeAdapter.json_schemas(typed, ref_template=_REF)
    schemas = {kind: schema for (kind, _), schema in made.items()}
    components = _used(defined["$defs"], schemas.values())
    for name in _used(components, [schemas[body] for body in bodies]):
        _allow_null(components[name])
    paths: dict[str, dict[str, Any]] = {}
    for route in shown:
        paths.setdefault(route.path_format, {})[route.method] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "description": DESCRIPTION, "version": VERSION},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY},
        "security": _ANY_KEY,
    }


def _used(schemas: Mapping[str, Any], of: Iterable[Any]) -> dict[str, Any]:
    """Of the schemas, those that `of` refer to. pydantic also lists the classes that validators of our own return."""
    found: dict[str, Any] = {}
    remaining = [*of]
    while remaining:
        for name in re.findall(_REF.format(model=r"(\w+)"), json.dumps(remaining.pop())):
            if name not in found:
                found[name] = schemas[name]
                remaining.append(schemas[name])
    return dict(sorted(found.items()))


def _allow_null(schema: dict[str, Any]) -> None:
    """Add null to every property of a body that may be left out: it means the same."""
    for name, property_ in schema.get("properties", {}).items():
        nullable = {"type": "null"} in property_.get("anyOf", ())
        if name not in schema.get("required", ()) and not nullable:
            kept = {key: property_.pop(key) for key in ("title", "description", "default") if key in property_}
            schema["properties"][name] = {"anyOf": [property_, {"type": "null"}], **kept}


def _operation(route: ApiRoute, schemas: Schemas) -> dict[str, Any]:
    """The OpenAPI operation object of one route."""
    operation: dict[str, Any] = {"tags": [route.tag], "summary": route.summary, "description": route.description}
    operation["operationId"] = re.sub(r"\W+", "_", f"{route.method} {route.path_format}").strip("_")
    if route.param_convertors:
        string = {"type": "string"}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": string} for name in route.param_convertors
        ]
    if route.body is not None:
        content = {"application/json": {"schema": schemas[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    operation["responses"] = _responses(route, schemas)
    if route.access is Access.ANYONE:
        operation["security"] = []
    return operation


def _responses(route: ApiRoute, schemas: Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {route.media_type: {"schema": schemas[route.answer]}}
    if route.body is not None and "stream" in route.body.model_fields:
        content["text/event-stream"] = {"schema": _EVENTS}
    responses: dict[str, Any] = {"200": {"description": "Success", "content": content}}
    error = {
        "application/json": {"schema": schemas[AnthropicError if route.path.startswith(ANTHROPIC_PREFIX) else Error]}
    }
    refused = () if route.access is Access.ANYONE else (401, 403)
    for status in sorted({*route.statuses, *refused}):
        responses[str(status)] = {"description": _ERRORS[status], "content": error}
    return responses
