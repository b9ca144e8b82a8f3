"""A body that would hold the interpreter's lock for too long is refused before it is parsed; the check holds it briefly."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from deployments.http.errors import InvalidJson
from deployments.http.parse_cost import CHUNK_BYTES, MOST_IN_WORDS, takes_too_long
from deployments.http.request_body import INLINE_BYTES, parse_json

MOST_HOLD_S = 0.02
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
def test_what_the_message_states_is_read_and_three_times_as_much_is_refused(what: str) -> None:
    number, body = STATED[what]
    assert f"{number} {what}" in MOST_IN_WORDS
    parse_json(body(number))
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
        assert len(raw) > INLINE_BYTES and not takes_too_long(raw)


@contextmanager
def longest_hold() -> Iterator[list[float]]:
    """The longest time in which a thread that only counts did not run, beyond the usual turns of threads."""
    held: list[float] = []
    ended = threading.Event()

    def count() -> None:
        longest, last = 0.0, time.perf_counter()
        while not ended.is_set():
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        held.append(longest)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    counting = threading.Thread(target=count)
    counting.start()
    try:
        yield held
    finally:
        ended.set()
        counting.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * BODY_BYTES,
        b'"' * BODY_BYTES,
        b"\\" * BODY_BYTES,
        b'{"prompt":[' + b'"",' * 199_000 + b'""],"x":"' + b"[" * (BODY_BYTES - 700_000) + b'"}',
        b'{"prompt":"' + b'\\"' * 3_900_000 + b'"}',
        b'{"prompt":"' + b"[" * (BODY_BYTES - 20) + b'"}',
        b'{"prompt":"' + b"\\n" * (BODY_BYTES // 2 - 20) + b'"}',
        listed("1.25", 999_000),
    ],
    ids=["brackets", "quotes", "backslashes", "strings", "escaped quotes", "a text of brackets", "escapes", "numbers"],
)
def test_no_body_holds_the_interpreters_lock_for_long(raw: bytes) -> None:
    """The best of several runs: on a busy machine the counting thread also waits for a core."""
    best = 1.0
    for _ in range(40):
        with longest_hold() as held, suppress(InvalidJson):
            parse_json(raw)
        best = min(best, held[0])
        if best < MOST_HOLD_S:
            return
    pytest.fail(f"the lock was held for {1000 * best:.0f} ms")
