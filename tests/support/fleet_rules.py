"""What holds for the streams of a simulated fleet, looked at after each round of the loop's callbacks."""

import asyncio
import time
from collections.abc import Sequence

from deployments.engine.sequence_stream import SequenceStream
from tests.support.fleets import FakeEngineProcess
from tests.support.virtual_loop import VirtualLoop


class Waits:
    """`longest_s`: how long a stream has gained no token at most while an engine that serves had a free slot for it."""

    def __init__(self, streams: Sequence[SequenceStream], engines: Sequence[FakeEngineProcess]) -> None:
        self.longest_s = 0.0
        self._streams, self._engines = streams, engines
        self._gained: dict[SequenceStream, tuple[int, float]] = {}  # length, and since when
        self._full_s = time.monotonic()  # when no engine had a free slot, at last
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop

    def __enter__(self) -> "Waits":
        self._loop.after_each.append(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.after_each.remove(self._look)

    def waiting(self) -> list[SequenceStream]:
        """Streams that have gained no token for over 1 s."""
        now_s = time.monotonic()
        return [stream for stream in self._left() if now_s - self._gained[stream][1] > 1.0]

    def _left(self) -> list[SequenceStream]:
        return [stream for stream in self._streams if not stream.ended]

    def _look(self) -> None:
        now_s = time.monotonic()
        if not any(map(_has_free_slot, self._engines)):
            self._full_s = now_s
        for stream in self._left():
            length, since_s = self._gained.get(stream, (0, now_s))
            if stream.sequence.length != length:
                self._gained[stream] = stream.sequence.length, now_s
            else:
                self.longest_s = max(self.longest_s, now_s - max(since_s, self._full_s))


def _has_free_slot(engine: FakeEngineProcess) -> bool:
    if engine.process.stands_still or engine.server is None or not engine.service.readiness().ready:
        return False
    scheduler = engine.service.loop.scheduler
    return scheduler.num_running + scheduler.num_waiting < engine.service.config.max_batch_size
