"""What the events of a stream add up to, whatever their division: for comparisons of streams of one request."""

import json
import re
from collections.abc import Iterable
from typing import Any

_RANDOM = re.compile(r"(chatcmpl|cmpl|call|msg|resp|toolu|fc|rs|item|call_)[-_][0-9a-f]{8,}")
_VARYING = ("created", "created_at", "completed_at", "sequence_number", "obfuscation", "last_event_id")
_TEXTS = ("text", "content", "arguments", "delta", "partial_json", "reasoning", "reasoning_content", "thinking")


def id_of(event: bytes) -> str:
    """The id of an event as it was sent; "" if it has none."""
    return next((line[4:].decode() for line in event.split(b"\n") if line.startswith(b"id: ")), "")


def data_of(event: bytes) -> str:
    return next(line[6:].decode() for line in event.split(b"\n") if line.startswith(b"data: "))


def joined(events: Iterable[bytes]) -> list[Any]:
    """By place in the events, in the order in which each came first: numbers and texts that follow one another are joined, and
    ids and times that each request has of its own are left out."""
    places: dict[str, Any] = {}
    for event in events:
        data = data_of(event)
        if data == "[DONE]":
            places["done"] = places.get("done", 0) + 1
            continue
        value = json.loads(data)
        kind = str(value.get("type", ""))
        for choice in value.pop("choices", ()):
            _add(places, f"choice {choice.pop('index')}", choice)
        _add(places, kind, value)
    return sorted(places.items())


def _add(places: dict[str, Any], place: str, value: Any) -> None:
    if isinstance(value, dict):
        number = f"[{value['index']}]" if isinstance(value.get("index"), int) else ""
        for name, item in value.items():
            if name not in _VARYING:
                _add(places, f"{place}{number}.{name}", item)
    elif isinstance(value, list) and any(isinstance(item, dict) and "index" in item for item in value):
        for item in value:
            _add(places, place, item)
    elif isinstance(value, list):
        places.setdefault(place, []).extend(json.loads(_RANDOM.sub(r"\1", json.dumps(value))))
    elif isinstance(value, str) and place.rpartition(".")[2] in _TEXTS:
        places[place] = places.get(place, "") + value
    elif isinstance(value, str):
        places.setdefault(place, set()).add(_RANDOM.sub(r"\1", value))
    elif value is not None:
        places[place] = value
