"""The headers by which a client asks for a stream that can be resumed: Idempotency-Key, and later Last-Event-ID."""

import hashlib
import re
import time
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Final

from deployments.engine.interface import Engine
from deployments.http.choices import Choices, submitted
from deployments.http.resume.kept_streams import KeptStream, KeptStreams, Reader, StreamKey, taken_over
from deployments.http.resume.place import EVENT_HEADER, Fingerprint, Place, began_s_of, changed, has_tokens, place_of
from deployments.openai.errors import AnswerChanged, IdempotencyKeyReused
from deployments.openai.plan import Plan
from llama_core.errors import InvalidParameter

KEY_HEADER: Final = "Idempotency-Key"
ID_BYTES: Final = 16
SEED_BYTES: Final = 8
_KEY_NAME: Final = KEY_HEADER.lower()
_EVENT_NAME: Final = EVENT_HEADER.lower()
_KEY = re.compile(r"[!-~]([ -~]{0,253}[!-~])?")


class Resumption:
    """One request that has an Idempotency-Key, and the stream that it reads."""

    def __init__(self, streams: KeptStreams, key: StreamKey, last_event: str) -> None:
        """last_event: the Last-Event-ID; "" if there is none."""
        self.reader = Reader()
        self._stream: KeptStream | None = None
        self._streams, self._key, self._last_event = streams, key, last_event
        self._digest, self._raw = b"", b""
        self.began_s = began_s_of(last_event) or int(time.time())  # which chat templates read

    def find(self, raw: bytes) -> KeptStream | None:
        """The stream that an earlier request with this body began, if it is kept here. Raises IdempotencyKeyReused where that
        request had another body."""
        digest = hashlib.blake2b(raw, digest_size=ID_BYTES + SEED_BYTES)
        for part in self._key:
            digest.update(b"\0" + part.encode())
        self._digest = digest.digest()
        return self._found()

    def _found(self) -> KeptStream | None:
        stream = self._streams.find(self._key)
        if stream is not None and stream.digest != self._digest:
            raise IdempotencyKeyReused.of(
                KEY_HEADER, "an earlier request with this key had another body; send the same bytes, or another key"
            )
        return stream

    def repeatable(self, plan: Plan, raw: bytes) -> Plan:
        """The plan with an id, and a seed if the client gives none, that are the same wherever the request is sent again. raw:
        the body, where the answer is stored."""
        self._raw, request = raw, plan.request
        if not plan.is_seeded:
            seed = int.from_bytes(self._digest[ID_BYTES:], signed=True)
            request = replace(request, params=[replace(params, seed=seed) for params in request.params])
        return replace(plan, request=request, answer_id=self._digest[:ID_BYTES].hex())

    @property
    def fingerprint(self) -> Fingerprint:
        assert self._stream is not None, "the request has been submitted"
        return self._stream.fingerprint

    def place(self, plan: Plan) -> Place | None:
        """Where the client is; None for a client that has nothing. Raises InvalidParameter for an id of another request."""
        return place_of(self._last_event, plan) if self._last_event else None

    async def choices(self, engine: Engine, plan: Plan, last: Place | None, *, is_timed: bool) -> Choices:
        """The stream's choices: those that are kept here, or new ones. Another reader of them is disconnected. last: of the
        client. Raises AnswerChanged where no engine can compute the rest."""
        stream, numerics = self._found(), ""
        if stream is None:
            fingerprint = Fingerprint(self.began_s, self._digest, engine, plan)
            if last is not None:
                numerics = _numerics_of(last, fingerprint, engine.served_numerics)
                self._streams.metrics.resumed_streams.add(source="computed")
            stream = KeptStream(self._key, self._digest, engine, plan, fingerprint, self._raw)
            self._streams.begin(stream, self.reader)
        else:
            self._streams.take(stream, self.reader)
        try:
            needed = {each.numerics for each in stream.streams if each.numerics and not each.ended}
            if (served := engine.served_numerics) and not needed <= served:
                raise changed()
            choices = await submitted(engine, plan, stream.streams, is_timed=is_timed, numerics=numerics)
        except BaseException as error:
            keeps = bool(stream.streams) and not isinstance(error, AnswerChanged)
            self._streams.put_back(stream, self.reader, keeps=keeps)
            raise
        if stream.reader is not self.reader:
            choices.cancel()
            raise taken_over()
        self._stream, stream.choices = stream, choices
        return choices

    def close(self, *, failed: bool) -> None:
        """The request has ended. failed: with an error that the client has been told, or would get again."""
        if self._stream is not None:
            self._streams.put_back(self._stream, self.reader, keeps=not failed)


def _numerics_of(last: Place, fingerprint: Fingerprint, served: Set[str]) -> str:
    """Those of `served` that have computed what the client has; "" where any engine may go on, or none runs now. Raises
    AnswerChanged."""
    if last.fingerprint is None or not any(map(has_tokens, last.reached)):
        return ""
    found = next((each for each in served if fingerprint.of((each,)) == last.fingerprint), None)
    if served and found is None:
        raise changed()
    return found or ""


def resumption(headers: Mapping[str, str], streams: KeptStreams, path: str, owner: str) -> Resumption | None:
    """headers: by names in lower case. None for a request without Idempotency-Key. Raises InvalidParameter that names the
    header."""
    key, last_event = (headers.get(name, "").strip() for name in (_KEY_NAME, _EVENT_NAME))
    if not (key or last_event):
        return None
    if not key:
        raise InvalidParameter.of(EVENT_HEADER, f"needs the {KEY_HEADER} of the request that began the stream")
    if not _KEY.fullmatch(key):
        raise InvalidParameter.of(KEY_HEADER, "must be at most 255 printable ASCII characters")
    return Resumption(streams, StreamKey(owner, path, key), last_event)
