"""A request that fails leaves nothing that only the garbage collector frees: collections are rare, and bodies may be large."""

import asyncio
import gc
import gzip
import json
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from deployments.api_keys import ApiKeys, digests_of
from deployments.engine.interface import Models
from deployments.http.app import build_http_app
from deployments.observe.metrics import Metrics
from llama_core.errors import RankFailure
from tests.deployments.http.test_adapter_routes import Loader
from tests.support.asgi_client import AsgiCall
from tests.support.loop_engine import LoopEngine
from tests.support.scripted_engine import FakeEngine
from tests.support.waiting import until_true

BIG = "a" * 400_000  # larger than what is parsed on the event loop
# By route: a body that is answered.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/responses": {"input": "hi"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"prompt": "hi", "continuations": ["you"]},
    "/v1/classify": {"prompt": "hi", "labels": ["a", "b"]},
    "/v1/load_lora_adapter": {"lora_name": "poet", "lora_path": "poet"},
    "/v1/unload_lora_adapter": {"lora_name": "clerk"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
GENERATING = [
    path for path in BODIES if path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
]


def app_of(engine: Models) -> Any:
    keys, admin_keys = ApiKeys(digests_of("user")), ApiKeys(digests_of("admin"))
    return build_http_app(engine, Metrics(in_ray=False), keys=keys, admin_keys=admin_keys, loader=Loader())


def large(body: dict[str, Any]) -> bytes:
    """`body` with a field that no route has."""
    return json.dumps(body | {"filler": BIG}).encode()


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def call(
    app: Any, path: str, body: bytes, headers: dict[str, str] | None = None, *, has_more: bool = False
) -> AsgiCall:
    return AsgiCall(app, path, body, {"authorization": "Bearer admin"} | (headers or {}), has_more=has_more)


async def failed(app: Any, path: str, body: bytes, headers: dict[str, str] | None = None) -> int:
    """The status."""
    request = call(app, path, body, headers)
    await request.end()
    return request.status


async def kept() -> list[str]:
    """The frames that only reference cycles hold, through errors: each holds a request, and with it its body or plan."""
    await asyncio.sleep(0.01)  # threads let go of their work
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    return [str(held) for held in gc.garbage if isinstance(held, FrameType)]


def bad_bodies(path: str) -> Iterator[tuple[bytes, dict[str, str]]]:
    body, gzipped = BODIES[path], {"content-encoding": "gzip"}
    yield b" " * len(BIG), {}
    yield gzip.compress(b" " * len(BIG)), gzipped
    yield gzip.compress(large(body))[:-5], gzipped
    yield large(body), {"content-length": "9"}
    yield large(body), {"content-type": "text/plain"}
    yield large(body)[:-1], {}
    yield large(body | {"model": "nowhere", "base_model_name": "nowhere"}), {}
    for name in body:
        for value in (1, "", {"a": BIG}, [{"a": BIG}], [[], BIG], BIG * 3, [10**12] * 60_000):
            yield large(body | {name: value}), {}


@pytest.mark.parametrize("path", BODIES)
async def test_refused_bodies_are_freed(path: str) -> None:
    app = app_of(FakeEngine())
    assert {route.path for route in app.routes if route.body is not None} == BODIES.keys()
    statuses = [await failed(app, path, body, headers) for body, headers in bad_bodies(path)]
    assert not await kept()
    assert 400 in statuses and 500 not in statuses


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", GENERATING)
async def test_requests_that_fail_later_are_freed(path: str, stream: bool) -> None:
    engine = LoopEngine(slots=1, max_waiting=1)
    app, body = app_of(engine), large(BODIES[path] | {"stream": stream})
    assert await failed(app, path, body, {"x-request-timeout-seconds": "0.05"}) in (200, 504), "no step is made"
    waiting = [call(app, path, body) for _ in range(4)]
    await until_true("a 429", lambda: any(each.status == 429 for each in waiting))
    engine.loop.fail(RankFailure("a rank has died"))
    while waiting:
        await waiting[-1].end()
        assert waiting.pop().status in (200, 429, 503)
    assert await failed(app, path, body) == 503
    del app, engine  # which keeps its failure
    assert not await kept()


@pytest.mark.parametrize("path", GENERATING)
async def test_requests_of_clients_that_leave_are_freed(path: str) -> None:
    async with LoopEngine().running() as engine:
        app = app_of(engine)
        for has_more, begun in ((True, False), (False, False), (False, True)):
            left = call(app, path, large(BODIES[path] | {"stream": begun, "max_tokens": 900}), has_more=has_more)
            await (left.arrived(2) if begun else asyncio.sleep(0.05))
            await left.leave()
            del left
    assert not await kept()
