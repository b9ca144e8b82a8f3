"""The routers of other projects, with packages of their own, which need not be installed."""

import asyncio
import importlib
import logging
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import count
from random import Random
from typing import Any, Final

import msgspec

from benchmarks.simulate.choosers import Chooser
from deployments.links.link import RoutedStream
from llama_core.scheduling.prefix_cache import PrefixCache
from llama_core.scheduling.request import Sequence as Seq
from tests.support.modelled_fleet import ModelledEngine, ModelledLink


class RayPrefixTree(Chooser):
    """Ray's router by cached prefixes with its defaults: of the engines with the longest prefix, the one with the shorter
    queue of two. A block of tokens is one character here. Ray's own class keeps the tree; the few lines that use it are its
    router's, which needs a cluster."""

    LEAST_MATCH = 0.1  # else those with the smallest part of the tree

    def __init__(self) -> None:
        root = logging.getLogger()
        level, handlers = root.level, [*root.handlers]
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        root.setLevel(level)  # which the import has changed for the whole process
        root.handlers[:] = handlers
        self._tree, self._draw, self._count = PrefixTree(), Random(1), 0

    def attach(self, engine: ModelledEngine) -> None:
        self._tree.add_tenants([engine.name], 0.0)

    def order(self, links: Sequence[ModelledLink], live: RoutedStream) -> Sequence[ModelledLink]:
        text, names = self._text(live, links[0]), [link.engine_id for link in links]
        matched, tenants = self._tree.prefix_match(text, names)
        if len(matched) < self.LEAST_MATCH * len(text):
            tenants = self._tree.get_smallest_tenants()
        best = [link for link in links if link.engine_id in (tenants or names)] or [*links]
        two = self._draw.sample(best, min(2, len(best)))
        two.sort(key=lambda link: link.engine.num_sequences)
        return [*two, *(link for link in links if link not in two)]

    def sent(self, live: RoutedStream, link: ModelledLink) -> None:
        self._count += 1
        self._tree.insert(self._text(live, link), link.engine_id, float(self._count))

    def _text(self, live: RoutedStream, link: ModelledLink) -> str:
        keys = live.prefixes.keys(link.engine.service.config.block_size)
        # Not the code points of surrogates; two equal ones of 55,000 cost a detour.
        return "".join(chr(1 + key % 55_000) for key in keys) or chr(1 + len(live.prefixes.prompt) % 55_000)


class DynamoSelection(Chooser):
    """Dynamo's router with its defaults: the `SelectionService` of ai-dynamo-runtime. Engines tell it their blocks by ZeroMQ
    (pyzmq), as vLLM does. It has a loop of its own, in a thread, and real time."""

    TOLD_S: Final = 0.001  # until it has read what engines have told

    def __init__(self) -> None:
        self._service = importlib.import_module("dynamo._core").SelectionService(indexer_threads=1)
        self._zmq = importlib.import_module("zmq")
        self._context, self._folder = self._zmq.Context(), tempfile.TemporaryDirectory()
        self._loop, self._numbers = asyncio.new_event_loop(), count(1)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._workers: dict[str, int] = {}
        self._reserved: dict[RoutedStream, str] = {}

    def _call(self, name: str, *given: Any) -> Any:
        async def inside() -> Any:
            return await getattr(self._service, name)(*given)

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result()

    def attach(self, engine: ModelledEngine) -> None:
        config, worker = engine.service.config, len(self._workers) + 1
        socket, address = self._context.socket(self._zmq.PUB), f"ipc://{self._folder.name}/{worker}"
        socket.bind(address)
        known: dict[str, Any] = {"block_size": config.block_size, "max_num_batched_tokens": config.max_step_tokens}
        known |= {
            "total_kv_blocks": engine.ranks.num_blocks,
            "kv_events_endpoint": address,
            "endpoint": f"http://{worker}",
        }
        self._call("upsert_worker", {"worker_id": worker, "model_name": "model"} | known)
        self._workers[engine.name] = worker
        time.sleep(0.3)  # the service subscribes
        events = count()

        def tell(event: Sequence[Any]) -> None:
            batch = msgspec.msgpack.encode([0.0, [event], 0])
            socket.send_multipart([b"", struct.pack(">q", next(events)), batch])

        admission = engine.service.loop.scheduler.admission
        admission.prefixes = _ToldPrefixes(admission.prefixes, tell)

    def order(self, links: Sequence[ModelledLink], live: RoutedStream) -> Sequence[ModelledLink]:
        self.ended(live)
        name = self._reserved[live] = str(next(self._numbers))
        time.sleep(self.TOLD_S)
        request = {"model_name": "model", "token_ids": live.prefixes.prompt, "selection_id": name}
        best = self._call("select_and_reserve", request)["worker_id"]
        return sorted(links, key=lambda link: self._workers[link.engine_id] != best)

    def began(self, live: RoutedStream) -> None:
        if (name := self._reserved.get(live)) is not None:  # else its first token was its last
            self._call("prefill_complete", name)

    def ended(self, live: RoutedStream) -> None:
        if (name := self._reserved.pop(live, None)) is not None:
            self._call("free_reservation", name)

    def close(self) -> None:
        self._service.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._context.destroy(linger=0)


class _ToldPrefixes(PrefixCache):
    """Tells what its index gains and loses."""

    def __init__(self, own: PrefixCache, tell: Any) -> None:
        super().__init__(own._index, own._window, is_enabled=True)
        self._tell, evict = tell, own._index.evict

        def evict_and_tell(blocks: Iterable[int]) -> None:
            found = list(blocks)
            gone = [prefix for block in found if (prefix := own._index._hash_of[block]) is not None]
            evict(found)
            if gone:
                tell(["BlockRemoved", [*map(_number, gone)], "GPU"])

        own._index.evict = evict_and_tell  # type: ignore[method-assign]

    def register(self, seq: Seq) -> None:
        first, size = seq.num_registered, self._block_size
        super().register(seq)
        if (last := seq.num_registered) > first:
            parent = _number(seq.block_hashes[first - 1]) if first else None
            hashes = [*map(_number, seq.block_hashes[first:last])]
            self._tell(["BlockStored", hashes, parent, seq.tokens[first * size : last * size], size, None, "GPU"])


def _number(prefix: bytes) -> int:
    return int.from_bytes(prefix[:8], "big") >> 1
