"""Answers that later requests refer to by an id: one replica's own, and, where it has none of that id, those of the others.

A request that refers to them gets their items in its input, before it is parsed.
"""

import asyncio
from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import msgspec
from pydantic_core import from_json, to_json

from deployments.http.request_body import BodyReader, parse_json
from deployments.http.responses_api.answer import ResponsesSerializer
from deployments.http.resume.kept_streams import KeptStreams, StreamKey
from deployments.openai.answers.answer import WholeSerializer
from deployments.openai.errors import BodyTooLarge, PreviousResponseNotFound
from deployments.openai.field_types import MAX_MESSAGES
from deployments.openai.tool_fields import MAX_ID_CHARS

# Of an owner and ids, by each replica: what it keeps of them.
AskOthers = Callable[[str, list[str]], Awaitable[list[Mapping[str, bytes]]]]

MAX_ASKING: Final = 4  # requests of one owner at one replica that ask the others at a time
_PATH: Final = "/v1/responses/{id}"  # of the keys


class StoredResponses:
    """Keeps answers within the bounds of kept streams, and apart by the owner of the API key."""

    def __init__(self, kept: KeptStreams, bodies: BodyReader, ask_others: AskOthers | None) -> None:
        self._kept, self._bodies, self._ask_others = kept, bodies, ask_others
        self._asking = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(MAX_ASKING))  # by owner

    def keep_end_of(self, serializer: WholeSerializer, raw: bytes, owner: str) -> None:
        """Keep the answer when it has ended, unless the client wants none stored. raw: of the body, with its whole input."""
        assert isinstance(serializer, ResponsesSerializer)
        if serializer.form.is_stored and self._kept.limits.window_s:
            serializer.on_end = partial(self._keep, owner, raw)

    def _keep(self, owner: str, raw: bytes, response: Mapping[str, Any]) -> None:
        """Under the id of the response its turn, and under the id of each item that item, as JSON."""
        items = {item["id"]: msgspec.json.encode(item) for item in response["output"]}
        turn = b'{"body":%s,"output":[%s]}' % (raw.removeprefix(BOM_UTF8), b",".join(items.values()))
        for name, text in {response["id"]: turn, **items}.items():
            self._kept.keep_text(StreamKey(owner, _PATH, name), text)

    def find(self, owner: str, ids: Iterable[str]) -> dict[str, bytes]:
        """Those that this replica keeps."""
        texts = {name: self._kept.text(StreamKey(owner, _PATH, name)) for name in ids}
        return {name: text for name, text in texts.items() if text is not None}

    async def completed(self, raw: bytes, owner: str) -> bytes:
        """The body with the items that it refers to; `raw` itself where it refers to none. Raises PreviousResponseNotFound,
        BodyTooLarge or InvalidJson."""
        if b"previous_response_id" not in raw and b"item_reference" not in raw:
            return raw
        fields = await self._bodies.run(len(raw), lambda: parse_json(raw))
        previous = fields.pop("previous_response_id", None)
        items = _items(fields.get("input"))
        if len(items) > MAX_MESSAGES or not isinstance(previous, str | None):
            return raw  # whose checks say what is wrong
        names = [name for name in (previous, *map(_reference, items)) if name is not None]
        if not names:
            return raw
        found = await self._found(owner, set(names))

        def joined() -> bytes:
            whole = [item if (name := _reference(item)) is None else from_json(found[name]) for item in items]
            if previous is not None:
                turn = from_json(found[previous])
                if "body" not in turn:  # the id is an item's
                    raise _not_found()
                whole = [*_items(turn["body"]["input"]), *turn["output"], *whole]
            return to_json(fields | {"input": whole})

        num_bytes = len(raw) + sum(len(found[name]) for name in names)  # each as often as it is named
        if num_bytes > (most := self._bodies.max_bytes):
            raise BodyTooLarge(f"The body with the items that it refers to is larger than {most} bytes.")
        return await self._bodies.run(num_bytes, joined)

    async def _found(self, owner: str, ids: set[str]) -> Mapping[str, bytes]:
        found = self.find(owner, ids)
        if any(len(name) > MAX_ID_CHARS for name in ids):
            raise _not_found()
        if (missing := ids - found.keys()) and self._ask_others is not None:
            async with self._asking[owner]:
                for answer in await self._ask_others(owner, sorted(missing)):
                    found.update(answer)
        if ids - found.keys():
            raise _not_found()
        return found


def _not_found() -> PreviousResponseNotFound:
    return PreviousResponseNotFound(
        "previous_response_id, item_reference: no such answer is kept (any more): send the items themselves, and store false",
        param="previous_response_id",
    )


def _items(given: object) -> list[Any]:
    """Of an input, which may be a text."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given if isinstance(given, list) else []


def _reference(item: object) -> str | None:
    """The id that an item stands for."""
    is_reference = isinstance(item, dict) and item.get("type") == "item_reference" and isinstance(item.get("id"), str)
    return item["id"] if is_reference else None  # type: ignore[index]
