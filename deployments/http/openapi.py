"""Writes the OpenAPI document of a list of routes, from the pydantic schemas of their bodies."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from deployments.http import answer_schemas
from deployments.http.auth import PROBE_PATHS
from deployments.http.errors import ANTHROPIC_PREFIX
from deployments.http.routing import ApiRoute

TITLE, VERSION = "Llama on Ray", "1"
DESCRIPTION = "OpenAI's completions, chat completions and responses, and Anthropic's messages."
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
    403: "The Host header has a name that is not allowed",
    404: "There is no such model, or no stream that is kept here",
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


def openapi_document(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of all routes that have a tag."""
    shown = [route for route in routes if route.include_in_schema]
    bodies = [route.body for route in shown if route.body is not None]
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    of_bodies = _used(schemas["$defs"], [body.__name__ for body in bodies])
    for schema in of_bodies.values():
        _allow_null(schema)
    paths: dict[str, dict[str, Any]] = {}
    of_answers: dict[str, Any] = {}
    for route in shown:
        paths.setdefault(route.path_format, {})[route.method] = _operation(route, of_answers)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "description": DESCRIPTION, "version": VERSION},
        "paths": paths,
        "components": {"schemas": {**of_bodies, **of_answers}, "securitySchemes": _SECURITY},
        "security": _ANY_KEY,
    }


def _used(schemas: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Of the schemas, those that `names` refer to. pydantic also lists the classes that validators of our own return."""
    found: set[str] = set()
    remaining = list(names)
    while remaining:
        if (name := remaining.pop()) not in found:
            found.add(name)
            remaining += re.findall(_REF.format(model=r"(\w+)"), json.dumps(schemas[name]))
    return {name: schema for name, schema in schemas.items() if name in found}


def _with_references(schema: Any, components: dict[str, Any]) -> Any:
    """The schema of an answer with a reference for each part that has a title, which is added to `components`."""
    if isinstance(schema, list):
        return [_with_references(each, components) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _with_references(each, components) for key, each in schema.items()}
    if (title := made.get("title")) is None:
        return made
    components[title] = made
    return {"$ref": _REF.format(model=title)}


def _allow_null(schema: dict[str, Any]) -> None:
    """Add null to every property of a body that may be left out: it means the same."""
    for name, property_ in schema.get("properties", {}).items():
        nullable = {"type": "null"} in property_.get("anyOf", ())
        if name not in schema.get("required", ()) and not nullable:
            kept = {key: property_.pop(key) for key in ("title", "description", "default") if key in property_}
            schema["properties"][name] = {"anyOf": [property_, {"type": "null"}], **kept}


def _operation(route: ApiRoute, components: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI operation object of one route. Adds the schemas of its answers to `components`."""
    operation: dict[str, Any] = {"tags": [route.tag], "summary": route.summary, "description": route.description}
    operation["operationId"] = re.sub(r"\W+", "_", f"{route.method} {route.path_format}").strip("_")
    if route.param_convertors:
        string = {"type": "string"}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": string} for name in route.param_convertors
        ]
    if route.body is not None:
        schema = {"$ref": _REF.format(model=route.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    operation["responses"] = _responses(route, components)
    if route.path in PROBE_PATHS:
        operation["security"] = []
    return operation


def _responses(route: ApiRoute, components: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {route.media_type: {"schema": _with_references(route.answer, components)}}
    if route.body is not None and "stream" in route.body.model_fields:
        content["text/event-stream"] = {"schema": answer_schemas.EVENTS}
    responses: dict[str, Any] = {"200": {"description": "Success", "content": content}}
    schema = answer_schemas.ANTHROPIC_ERROR if route.path.startswith(ANTHROPIC_PREFIX) else answer_schemas.ERROR
    error = {"application/json": {"schema": _with_references(schema, components)}}
    refused = () if route.path in PROBE_PATHS else (401, 403)
    for status in sorted({*route.statuses, *refused}):
        responses[str(status)] = {"description": _ERRORS[status], "content": error}
    return responses
