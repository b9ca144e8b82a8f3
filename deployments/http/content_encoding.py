"""Decompresses a request's body in pieces, so that a small body of a huge one is refused before the huge one exists."""

import zlib
from collections.abc import Iterator

from deployments.http.errors import InvalidJson, UnsupportedMediaType

GZIP_WINDOW = 16 + zlib.MAX_WBITS
PIECE_BYTES = 128 * 2**10  # about 0.3 ms of work


def is_compressed(encoding: str) -> bool:
    """Whether a body with this Content-Encoding is gzip. Raises UnsupportedMediaType for an encoding that is not known."""
    if not encoding:
        return False
    name = encoding.strip().lower()
    if name not in ("", "identity", "gzip", "x-gzip"):
        raise UnsupportedMediaType("The body's Content-Encoding must be gzip, or none.")
    return name.endswith("gzip")


def gunzipped(raw: bytes) -> Iterator[bytes]:
    """The plain bytes in pieces of at most PIECE_BYTES. Raises InvalidJson for bytes that are not one whole gzip stream."""
    stream = zlib.decompressobj(GZIP_WINDOW)
    while not stream.eof:
        try:
            piece = stream.decompress(raw, PIECE_BYTES)
        except zlib.error:
            raise InvalidJson("The body is not valid gzip, as its Content-Encoding says.") from None
        raw = stream.unconsumed_tail
        if not piece and not raw and not stream.eof:
            raise InvalidJson("The body's gzip stream is cut short.")
        yield piece
    if stream.unused_data:
        raise InvalidJson("The body has bytes after the end of its gzip stream.")
