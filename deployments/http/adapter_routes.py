"""vLLM's routes that load and unload LoRA adapters, for admin keys."""

import logging
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.request_body import BodyReader
from deployments.http.routing import Access, ApiRoute
from deployments.openai.adapter_schemas import LoadAdapterBody, UnloadAdapterBody
from deployments.openai.errors import ModelNotFound

log = logging.getLogger(__name__)

STATUSES = (400, 403, 404, 408, 413, 415, 503)


class Loader(Protocol):
    """Implemented by `AdapterLoader`."""

    async def load(self, name: str, folder: str, base: str | None, *, replaces: bool) -> None: ...
    async def unload(self, name: str, base: str | None) -> bool: ...


def adapter_routes(loader: Loader, bodies: BodyReader) -> list[ApiRoute]:
    async def load(request: Request) -> Response:
        async with bodies.received(request) as raw:
            body = await bodies.parse(raw, LoadAdapterBody)
        replaces = body.load_inplace is True
        await loader.load(body.lora_name, body.lora_path, body.base_model_name, replaces=replaces)
        log.info("the adapter %r of %r has been loaded by a request", body.lora_name, body.lora_path)
        return Response("The adapter is loaded.\n", media_type="text/plain")

    async def unload(request: Request) -> Response:
        async with bodies.received(request) as raw:
            body = await bodies.parse(raw, UnloadAdapterBody)
        if not await loader.unload(body.lora_name, body.base_model_name):
            raise ModelNotFound("lora_name: no adapter of this name has been loaded", param="lora_name")
        log.info("the adapter %r has been unloaded by a request", body.lora_name)
        return Response("The adapter is unloaded.\n", media_type="text/plain")

    route = partial(
        ApiRoute, method="POST", access=Access.ADMIN, tag="models", statuses=STATUSES, media_type="text/plain"
    )
    return [
        route(
            "/v1/load_lora_adapter",
            load,
            summary="Load a LoRA adapter",
            description="Into every engine, also those that start later. Needs an admin key.",
            body=LoadAdapterBody,
        ),
        route(
            "/v1/unload_lora_adapter",
            unload,
            summary="Unload a LoRA adapter",
            description="New requests get 404; streams that use it go on. Needs an admin key.",
            body=UnloadAdapterBody,
        ),
    ]
