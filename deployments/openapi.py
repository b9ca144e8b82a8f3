"""Documents bodies that are parsed by hand, so that /docs and /openapi.json still show their schemas."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_BODIES: tuple[type[BaseModel], ...] = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
_REF = "#/components/schemas/{model}"


def body_docs(body: type[BaseModel]) -> dict[str, Any]:
    """For `openapi_extra` of a route whose body is a `body`."""
    schema = {"schema": {"$ref": _REF.format(model=body.__name__)}}
    return {"requestBody": {"required": True, "content": {"application/json": schema}}}


def document(app: FastAPI) -> None:
    """Make the application's OpenAPI document hold the schemas that `body_docs` refers to."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, schemas = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REF)
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            made.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
