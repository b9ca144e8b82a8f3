"""Documents what FastAPI cannot see, so that /docs and /openapi.json show it: bodies parsed by hand, and routes below it."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.http.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_BODIES: tuple[type[BaseModel], ...] = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
_REF = "#/components/schemas/{model}"


def body_docs(body: type[BaseModel]) -> dict[str, Any]:
    """For `openapi_extra` of a route whose body is a `body`."""
    schema = {"schema": {"$ref": _REF.format(model=body.__name__)}}
    return {"requestBody": {"required": True, "content": {"application/json": schema}}}


def operation(summary: str, description: str, body: type[BaseModel]) -> dict[str, Any]:
    """What FastAPI makes of a function that answers a POST, for a route that is an ASGI application."""
    answer = {"description": "Successful Response", "content": {"application/json": {"schema": {}}}}
    about = {"tags": ["generation"], "summary": summary, "description": description}
    return {"post": {**about, **body_docs(body), "responses": {"200": answer}}}


def document(app: FastAPI, operations: dict[str, dict[str, Any]]) -> None:
    """Make the application's OpenAPI document hold `operations`, by their paths, and the schemas that `body_docs` refers to."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, schemas = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REF)
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            made["paths"] = {**operations, **made["paths"]}
            made.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
