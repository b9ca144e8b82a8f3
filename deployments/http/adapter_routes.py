"""vLLM's routes that load and unload LoRA adapters, for admin keys."""

import logging
from functools import partial
from typing import Protocol

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from deployments.http.request_body import BodyReader
from deployments.http.routing import Access, ApiRoute
from deployments.openai.errors import ModelNotFound
from deployments.openai.field_types import Body, Flag

log = logging.getLogger(__name__)

STATUSES = (400, 403, 404, 408, 413, 415, 503)


class UnloadAdapterBody(Body):
    lora_name: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$", description="The model's name.")
    base_model_name: str | None = Field(None, description="Needed where several models are served.")


class LoadAdapterBody(UnloadAdapterBody):
    lora_path: str = Field(
        min_length=1,
        max_length=2000,
        description="Folder of PEFT's files, on every node, below the engine's lora_root.",
    )
    load_inplace: Flag = Field(None, description="true: replaces a loaded adapter of this name.")


class Loader(Protocol):
    """Implemented by `AdapterLoader`."""

    async def load(self, name: str, folder: str, base: str | None, *, replaces: bool) -> None: ...
    async def unload(self, name: str, base: str | None) -> bool: ...


def adapter_routes(loader: Loader, bodies: BodyReader) -> list[ApiRoute]:
    async def load(request: Request) -> Response:
        """Load a LoRA adapter.

        Into every engine, also those that start later. Needs an admin key.
        """
        async with bodies.received(request) as raw:
            body = await bodies.parse(raw, LoadAdapterBody)
        replaces = body.load_inplace is True
        await loader.load(body.lora_name, body.lora_path, body.base_model_name, replaces=replaces)
        log.info("the adapter %r of %r has been loaded by a request", body.lora_name, body.lora_path)
        return Response("The adapter is loaded.\n", media_type="text/plain")

    async def unload(request: Request) -> Response:
        """Unload a LoRA adapter.

        New requests get 404; streams that use it go on. Needs an admin key.
        """
        async with bodies.received(request) as raw:
            body = await bodies.parse(raw, UnloadAdapterBody)
        if not await loader.unload(body.lora_name, body.base_model_name):
            raise ModelNotFound.of("lora_name", "no adapter of this name has been loaded")
        log.info("the adapter %r has been unloaded by a request", body.lora_name)
        return Response("The adapter is unloaded.\n", media_type="text/plain")

    route = partial(
        ApiRoute, method="POST", access=Access.ADMIN, tag="models", statuses=STATUSES, media_type="text/plain"
    )
    return [
        route("/v1/load_lora_adapter", load, body=LoadAdapterBody),
        route("/v1/unload_lora_adapter", unload, body=UnloadAdapterBody),
    ]
