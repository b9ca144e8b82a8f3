"""A body that would hold the interpreter's lock for too long is refused before it is parsed; the check holds it briefly."""

import json
from collections.abc import Callable
from contextlib import suppress

import pytest
from pydantic_core import from_json

from deployments.http.request_body import INLINE_BYTES, parse_json
from deployments.openai.errors import InvalidJson
from deployments.openai.parse_cost import CHUNK_BYTES, MOST_IN_WORDS, begin_body, takes_too_long
from tests.support.waiting import processor_s

BODY_BYTES = 16 * 2**20


def listed(item: str, number: int) -> bytes:
    return ('{"prompt":[' + ",".join([item] * number) + "]}").encode()


STATED: dict[str, tuple[int, Callable[[int], bytes]]] = {
    "numbers": (500_000, lambda count: listed("12345", count)),
    "strings": (300_000, lambda count: listed('"a word"', count)),
    "keys": (100_000, lambda count: json.dumps({"a": {f"key {i}": 1 for i in range(count)}}).encode()),
    "lists": (100_000, lambda count: listed("[1]", count)),
    "escapes": (1_500_000, lambda count: b'{"prompt":"' + b"\\n" * count + b'"}'),
}


@pytest.mark.parametrize("what", STATED)
def test_what_the_message_states_is_read_and_three_times_as_much_is_refused(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, body = STATED[what]
    assert f"{number} {what}" in MOST_IN_WORDS
    parse_json(body(number))
    monkeypatch.setattr("deployments.http.request_body.from_json", lambda *_, **__: pytest.fail("was parsed"))
    with pytest.raises(InvalidJson, match="more than this server reads"):
        parse_json(body(3 * number))


def test_the_ids_of_the_largest_usual_batch_are_read() -> None:
    """128 prompts of 4,096 ids, which fill the context of a Llama 2."""
    prompt = "[" + ",".join(["31999"] * 4096) + "]"
    assert len(parse_json(listed(prompt, 128))["prompt"]) == 128


@pytest.mark.parametrize("text", ["[[{,:", "\\", '"', '[\\"', "9" * 200])
def test_structure_inside_a_string_costs_nothing(text: str) -> None:
    """Fewer escapes than the limit, because escapes take time of their own."""
    for shift in range(3):  # so that escapes fall on the ends of chunks
        raw = json.dumps({"prompt": " " * shift + text * (12 * CHUNK_BYTES // len(text))}).encode()
        begin_body()
        assert len(raw) > INLINE_BYTES and not takes_too_long(raw)


def parser_s(raw: bytes) -> float:
    """Processor time of the parser, which holds the interpreter's lock all the while."""

    def parse() -> None:
        with suppress(ValueError):
            from_json(raw, allow_inf_nan=False, cache_strings="none")

    return processor_s(parse)


@pytest.mark.parametrize(
    "item",
    ["1.25", '""', "[1]", '{"a":1}', "9" * 4000, '"é"'],
    ids=["numbers", "strings", "lists", "objects", "long integers", "not ASCII"],
)
def test_what_is_read_of_a_large_body_takes_the_parser_as_long_as_stated(item: str) -> None:
    """All of it would take 4 to 80 times as long."""
    raw = listed(item, BODY_BYTES // (len(item) + 1))
    begin_body()
    while takes_too_long(raw):
        raw = raw[: len(raw) // 2]
        begin_body()
    number, numbers = STATED["numbers"]
    assert parser_s(raw) < 3 * parser_s(numbers(number))
