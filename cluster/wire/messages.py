"""The messages between driver and ranks as bytes. Knows nothing of addresses, of Ray or of scheduling.

A frame is a 4-byte big-endian length and that many bytes of MessagePack: plain data, checked against its type while it is
decoded, so a peer can send wrong numbers but no code. The driver sends `StepInput`. A rank answers every step once, with
`Answer` (rank 0) or `Ack` (other ranks), or sends `Fault` with the reason for which it ends.
"""

import dataclasses
import select
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from llama_core.scheduling.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKENS,
    SamplingParams,
)
from llama_core.scheduling.step import StepInput, StepOutput

MAX_FRAME_BYTES: Final = 128 * 2**20  # 256 sequences of 32,768 tokens with grammars, admitted at once, take up to 80 MB
MAX_HELLO_BYTES: Final = 256  # the most that a peer may send before it has proven to know the group's secret
HEADER_BYTES: Final = 4
_MAX_INT_BYTES: Final = 5  # MessagePack's type byte and 32 bits: a token or a block
# Errors of decoding, text that is not UTF-8 and deep nesting included.
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_MAX_PARAMS_BYTES: Final = sum(10 + len(field.name) for field in dataclasses.fields(SamplingParams))  # a number has 9
_MAX_STOP_IDS: Final = 64  # of a model
_MAX_RULES_BYTES: Final = (
    2 * MAX_STOP_TOKENS * _MAX_INT_BYTES  # stop_token_ids, and `delayed`, which has the model's stop ids too
    + _MAX_STOP_IDS * _MAX_INT_BYTES
    + MAX_LOGIT_BIASES * (1 + _MAX_INT_BYTES + 9)
    + MAX_BAD_WORDS * (3 + MAX_BAD_WORD_TOKENS * _MAX_INT_BYTES)
    + MAX_ALLOWED_TOKENS * _MAX_INT_BYTES
    + MAX_GRAMMAR_BYTES
)
# A slot's other names, its scope, row, new block, a few drafts; also a step's fields.
_MAX_FIELDS_BYTES: Final = 260 + _MAX_PARAMS_BYTES
_MAX_LOAD_BYTES: Final = 4096 + 80  # the path of a LoRA adapter and its digest
_MAX_REST_BYTES: Final = _MAX_FIELDS_BYTES + _MAX_RULES_BYTES + _MAX_LOAD_BYTES


class WireError(Exception):
    """A frame that is too long, truncated, or not the expected message. The connection cannot be used after it."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A rank's first message. `secret` is the group's, new for every start; a Ray call has carried it to the rank."""

    epoch: int
    rank: int
    secret: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """Rank 0's answer to a step."""

    output: StepOutput


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """Another rank's answer to a step: it is computed."""

    epoch: int
    step: int
    rank: int


class Fault(msgspec.Struct, frozen=True, array_like=True, tag="fault"):
    """A rank's last message. `kind` is the exception's class. `collective`: the exception was raised by an operation between
    ranks, so another rank's death may be the cause."""

    epoch: int
    rank: int
    kind: str
    message: str
    collective: bool


Reply = Answer | Ack | Fault

_encoder = msgspec.msgpack.Encoder()


def frame(message: object) -> bytes:
    """`message` as one frame. Raises WireError if it is over MAX_FRAME_BYTES."""
    buffer = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, buffer, HEADER_BYTES)
    num_bytes = len(buffer) - HEADER_BYTES
    if num_bytes > MAX_FRAME_BYTES:
        raise WireError(f"a message of {num_bytes} bytes is over the limit of {MAX_FRAME_BYTES}")
    buffer[:HEADER_BYTES] = num_bytes.to_bytes(HEADER_BYTES, "big")
    return bytes(buffer)


def largest_step_bytes(max_batch_size: int, max_seq_len: int, blocks_per_sequence: int) -> int:
    """Upper bound of a step's payload: every slot is admitted at full length."""
    sequence = (max_seq_len + blocks_per_sequence) * _MAX_INT_BYTES + _MAX_REST_BYTES
    return max_batch_size * sequence + _MAX_FIELDS_BYTES


def longest_sequence(max_batch_size: int, block_size: int) -> int:
    """The most tokens of a sequence with which no step of `max_batch_size` slots is over MAX_FRAME_BYTES."""
    num_ints = ((MAX_FRAME_BYTES - _MAX_FIELDS_BYTES) // max_batch_size - _MAX_REST_BYTES) // _MAX_INT_BYTES
    return (num_ints - 1) * block_size // (block_size + 1)


def decoder(kind: Any, name: str) -> Callable[[bytes], Any]:
    """Reads the payload of a message of this type, and raises WireError for what is none. name: for the error."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(payload: bytes) -> Any:
        try:
            return decode(payload)
        except UNREADABLE as error:
            raise WireError(f"not {name}: {error}") from error

    return read


decode_step: Callable[[bytes], StepInput] = decoder(StepInput, "a step")
decode_reply: Callable[[bytes], Reply] = decoder(Reply, "an answer to a step")
decode_hello: Callable[[bytes], Hello] = decoder(Hello, "a greeting")


class Deframer:
    """Splits a stream of bytes, in pieces of any size, into payloads."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that `data` completes. Raises WireError on a length over the limit, before it stores that much."""
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES:
            num_bytes = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
            if num_bytes > self.max_frame_bytes:
                raise WireError(f"a message of {num_bytes} bytes is over the limit of {self.max_frame_bytes}")
            end = HEADER_BYTES + num_bytes
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            yield payload


class FrameSocket:
    """The rank's end of a connection: a blocking socket (plain or TLS) that carries frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: StepInput | Reply | Hello) -> None:
        """Raises OSError if the peer is gone, WireError if the message is too long."""
        self._socket.sendall(frame(message))

    def is_waiting(self, timeout_s: float) -> bool:
        """Whether data or the end of the connection arrives within `timeout_s`."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        return bool(select.select([self._socket], [], [], timeout_s)[0])  # poll() has a resolution of a millisecond

    def receive(self) -> bytes | None:
        """The next payload, or None when the peer has closed between two frames. Raises WireError, OSError."""
        header = self._read(HEADER_BYTES)
        if header is None:
            return None
        num_bytes = int.from_bytes(header, "big")
        if num_bytes > MAX_FRAME_BYTES:
            raise WireError(f"a message of {num_bytes} bytes is over the limit of {MAX_FRAME_BYTES}")
        payload = self._read(num_bytes)
        if payload is None:
            raise WireError("the connection was closed inside a message")
        return payload

    def close(self) -> None:
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes | None:
        """Exactly `num_bytes`, or None if the peer closed before the first of them."""
        if num_bytes == 0:
            return b""
        data = self._socket.recv(num_bytes)
        if len(data) == num_bytes:  # the common case: a step is one small write
            return data
        if not data:
            return None
        parts = bytearray(data)
        while len(parts) < num_bytes:
            data = self._socket.recv(num_bytes - len(parts))
            if not data:
                raise WireError("the connection was closed inside a message")
            parts += data
        return bytes(parts)
