"""Requests that schemathesis generates from the server's OpenAPI document, in its coverage phase and its negative phase."""

from collections.abc import Iterator
from typing import Any

import requests
import schemathesis
from hypothesis.errors import HypothesisException
from schemathesis import GenerationMode
from schemathesis.generation.drivers import CoverageGenerator
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.generation.overrides import Override

from tests.fuzz.messages import Message, collect

_BASE = "http://127.0.0.1"
_PER_BATCH = 200
_DROPPED = {"connection", "content-length", "host", "user-agent", "accept", "accept-encoding"}  # the client's own


def covering(document: dict[str, Any]) -> Iterator[Message]:
    """Requests with every boundary value of every field of every route, one at a time, valid and invalid."""
    schema = schemathesis.openapi.from_dict(document)
    for found in schema.get_all_operations():
        operation = found.ok()
        cases = CoverageGenerator(
            operation=operation,
            generation_modes=list(GenerationMode),
            generation_config=schema.config.generation,
            auth_storage=None,
            override=Override(query={}, headers={}, cookies={}, path_parameters={}, body={}),
            feedback=FeedbackSources(),
        )
        for case in cases:
            if (message := _message("coverage", case)) is not None:
                yield message


def negative(document: dict[str, Any], count: int, seed: int) -> Iterator[list[Message]]:
    """Bodies that violate the schema, in batches by route; one in eight is valid."""
    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations()]
    operations = [operation for operation in operations if operation.body or operation.path_parameters]
    strategies = [(mode, op.as_strategy(generation_mode=mode)) for op in operations for mode in _MODES]
    left, number = count, 0
    while left > 0:
        mode, strategy = strategies[number % len(strategies)]
        size = min(left, _PER_BATCH if mode is GenerationMode.NEGATIVE else _PER_BATCH // 8)
        batch: list[Message] = []

        def take(case: schemathesis.Case[Any], batch: list[Message] = batch) -> None:
            if (message := _message("schema", case)) is not None:
                batch.append(message)

        try:
            collect(strategy, size, seed * 1_000_003 + number, take)
        except HypothesisException:  # no body violates this route's schema
            strategies.remove((mode, strategy))
        yield batch
        left, number = left - size, number + 1


_MODES = (GenerationMode.NEGATIVE, GenerationMode.POSITIVE)


def _message(kind: str, case: schemathesis.Case[Any]) -> Message | None:
    """The request as a message; None if it cannot be written as HTTP."""
    try:
        known = {name: value for name, value in case.as_transport_kwargs(_BASE).items() if name in _REQUEST_ARGUMENTS}
        prepared = requests.Request(**known).prepare()
    except (ValueError, requests.RequestException):
        return None
    assert prepared.url is not None and prepared.method is not None
    body = prepared.body or b""
    headers = tuple(
        (_bytes(name), _bytes(value)) for name, value in prepared.headers.items() if name.lower() not in _DROPPED
    )
    path = prepared.url.removeprefix(_BASE) or "/"
    return Message(kind, prepared.method, path, body if isinstance(body, bytes) else str(body).encode(), headers)


_REQUEST_ARGUMENTS = ("method", "url", "headers", "params", "cookies", "data", "json", "files")


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1", "replace")
