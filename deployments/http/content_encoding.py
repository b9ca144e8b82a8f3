"""Decompresses a request's body in pieces, so that a small body of a huge one is refused before the huge one exists.

Blocks without content yield nothing and take time, so the input of a piece is bounded as well as its output.
"""

import zlib
from collections.abc import Iterator
from typing import Final

from deployments.openai.errors import InvalidJson, UnsupportedMediaType

GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
PIECE_BYTES: Final = 128 * 2**10  # about 0.3 ms of work
# Of a piece: up to 2.5 ms of work, where each 11 bytes are a block with tables of its own.
INPUT_BYTES: Final = 16 * 2**10
# Bytes that the gzip may have more than what it holds: its header, and blocks that a client has flushed.
MOST_WITHOUT_CONTENT: Final = 64 * 2**10


def is_compressed(encoding: str) -> bool:
    """Whether a body with this Content-Encoding is gzip. Raises UnsupportedMediaType for an encoding that is not known."""
    if not encoding:
        return False
    name = encoding.strip().lower()
    if name not in ("", "identity", "gzip", "x-gzip"):
        raise UnsupportedMediaType("The body's Content-Encoding must be gzip, or none.")
    return name.endswith("gzip")


def gunzipped(raw: bytes | bytearray) -> Iterator[bytes]:
    """The plain bytes in pieces of at most PIECE_BYTES, each of at most INPUT_BYTES of `raw`.

    Raises InvalidJson for bytes that are not one whole gzip stream, or that hold almost nothing."""
    stream = zlib.decompressobj(GZIP_WINDOW)
    num_read = num_plain = 0
    while not stream.eof:
        if not (given := stream.unconsumed_tail):
            given = bytes(raw[num_read : num_read + INPUT_BYTES])
            num_read += len(given)
        try:
            piece = stream.decompress(given, PIECE_BYTES)
        except zlib.error:
            raise InvalidJson("The body is not valid gzip, as its Content-Encoding says.") from None
        num_plain += len(piece)
        if not piece and not given:
            raise InvalidJson("The body's gzip stream is cut short.")
        if num_read - len(stream.unconsumed_tail) > num_plain + MOST_WITHOUT_CONTENT:
            raise InvalidJson(
                f"The body's gzip stream has over {MOST_WITHOUT_CONTENT} bytes more than what it holds: send it plain."
            )
        yield piece
    if stream.unused_data or num_read < len(raw):
        raise InvalidJson("The body has bytes after the end of its gzip stream.")
