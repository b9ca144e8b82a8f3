"""Writes the OpenAPI document of a list of routes, from the pydantic schemas of their bodies."""

import re
from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

from deployments.http.routing import ApiRoute

TITLE, VERSION = "Llama on Ray", "1"
DESCRIPTION = "OpenAI's completions and chat completions."
_REF = "#/components/schemas/{model}"
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def openapi_document(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of all routes that have a tag."""
    shown = [route for route in routes if route.include_in_schema]
    bodies = [route.body for route in shown if route.body is not None]
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in shown:
        paths.setdefault(route.path_format, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "description": DESCRIPTION, "version": VERSION},
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR_SCHEMA}},
    }


def _operation(route: ApiRoute) -> dict[str, Any]:
    """The OpenAPI operation object of one route."""
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
    error = {"schema": {"$ref": _REF.format(model="Error")}}
    operation["responses"] = {
        "200": {"description": "Success", "content": {route.media_type: {"schema": {}}}},
        "default": {"description": "Error", "content": {"application/json": error}},
    }
    return operation
