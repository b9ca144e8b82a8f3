"""The time for which a stream collects events before its next message, where messages pass through a proxy in Python.

Serve's own proxy and the replica spend about 1 ms of processor time on each message of a stream, however long the message is.
With many streams fewer and larger messages leave that time to the ranks. HAProxy needs none of this.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class ProxyCoalescing:
    """The interval between two messages of a stream: 6 ms for each other live stream, 200 ms at most.

    One stream alone sends every token at once, and the first message of a stream never waits.
    """

    per_other_stream_s: float = 0.006
    longest_s: float = 0.2
    num_streams: int = 0

    @property
    def interval_s(self) -> float:
        return min(self.longest_s, self.per_other_stream_s * max(0, self.num_streams - 1))

    @contextmanager
    def live_stream(self) -> Iterator[None]:
        """Counts one stream while the block runs."""
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1
