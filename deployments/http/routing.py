"""A route of the application, with its entry of the API reference."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from starlette.routing import Route
from starlette.types import ASGIApp, Scope


class ApiRoute(Route):
    """One method of one path. A route without a `tag` is left out of the API reference; `body` is its body's schema."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any] | ASGIApp,
        *,
        method: str = "GET",
        tag: str = "",
        summary: str = "",
        description: str = "",
        body: type[BaseModel] | None = None,
        media_type: str = "application/json",
    ) -> None:
        super().__init__(path, endpoint, methods=[method], include_in_schema=bool(tag))
        self.method = method.lower()
        self.tag = tag
        self.summary = summary
        self.description = description
        self.body = body
        self.media_type = media_type


def route_path(scope: Scope) -> str:
    """The path of a request without the prefix under which the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
