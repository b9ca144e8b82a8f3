"""Estimates the time that a body takes to parse, and refuses a body that would hold the interpreter's lock for too long.

The parser holds the lock from the first byte to the last, so every stream of the replica waits for it, also where it runs in
a thread. The estimate itself reads a body in chunks, between which other threads run. JSON in a body's strings, such as the
arguments of calls, counts with the body.
"""

from contextvars import ContextVar
from typing import Final

MOST_NS: Final = 20e6  # of one body
MOST_IN_WORDS: Final = (
    "500000 numbers, 300000 strings, 100000 keys, 100000 lists or objects, 1500000 escapes or 1 MB of long integers"
)
# Nanoseconds for each, outside strings unless said otherwise, of pydantic_core's parser on one core of 2.5 GHz.
MARK_NS: Final = {b",": 20.0, b":": 80.0, b"[": 110.0, b"{": 60.0}
BYTE_NS: Final = 2.0
QUOTE_NS: Final = 12.0
ESCAPE_NS: Final = 12.0  # in strings
NON_ASCII_NS: Final = 1.5  # for every byte of a body that is not ASCII
DIGIT_RUN, DIGIT_RUN_NS = 128, 1100.0  # the time to parse an integer grows with the square of its digits
CHUNK_BYTES: Final = 64 * 2**10
_spent_ns: ContextVar[float] = ContextVar("_spent_ns", default=0.0)  # for the body that this thread or task parses


def begin_body() -> None:
    """What `takes_too_long` is asked from now on belongs to another body."""
    _spent_ns.set(0.0)


def takes_too_long(raw: bytes) -> bool:
    """Whether parsing `raw`, after what has been parsed of this body, is estimated to take more than MOST_NS. Stops reading
    where that is certain."""
    cost_ns = _spent_ns.get() + (0.0 if raw.isascii() else NON_ASCII_NS * len(raw))
    begin, in_string = 0, 0
    while begin < len(raw):
        chunk = raw[begin : begin + CHUNK_BYTES]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:
            chunk = raw[begin : begin + CHUNK_BYTES + 1]  # an escape belongs to one chunk
        begin += len(chunk)
        if num_escapes := chunk.count(b"\\"):
            cost_ns += ESCAPE_NS * num_escapes
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = chunk.split(b'"')
        cost_ns += QUOTE_NS * (len(pieces) - 1) + _outside_ns(b'"'.join(pieces[in_string::2]))
        in_string = (in_string + len(pieces) - 1) % 2
        if cost_ns > MOST_NS:
            break
    _spent_ns.set(cost_ns)
    return cost_ns > MOST_NS


def _outside_ns(outside: bytes) -> float:
    """For what stands outside strings. Each string is a quotation mark."""
    cost_ns = BYTE_NS * len(outside) + sum(ns * outside.count(mark) for mark, ns in MARK_NS.items())
    pieces = range(0, len(outside), DIGIT_RUN) if len(outside) > DIGIT_RUN else ()
    return cost_ns + DIGIT_RUN_NS * sum(outside[at : at + DIGIT_RUN].isdigit() for at in pieces)
