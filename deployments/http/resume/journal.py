"""The events of one stream, numbered and kept for a client that asks for those after an id.

Knows nothing of what the events say. An event's id is the stream's name and the event's number.
"""

import re
import uuid
from array import array
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

END: Final = b"\n\n"  # of an event; JSON has no line feed of its own
SLICE_BYTES: Final = 64 * 2**10
INDEX_BYTES: Final = 8  # of each event
NAME_DIGITS: Final = 16
_EVENT_ID = re.compile(rf"([0-9a-f]{{{NAME_DIGITS}}})-(\d{{1,15}})")


class EventId(NamedTuple):
    """stream: its name. number: 1 for the first event."""

    stream: str
    number: int


def parsed_id(text: str) -> EventId | None:
    """The event that an id of this server names; None for any other text."""
    found = _EVENT_ID.fullmatch(text)
    return None if found is None else EventId(found[1], int(found[2]))


class Journal:
    """Kept events as one run of bytes: an object for each of them would take as much memory again."""

    def __init__(self, on_growth: Callable[[int], None]) -> None:
        """on_growth: called with the number of bytes that the journal has grown by."""
        self.name = uuid.uuid4().hex[:NAME_DIGITS]
        self._on_growth = on_growth
        self._events = bytearray()
        self._ends = array("Q")  # of each event in `_events`
        self._is_dropped = False

    @property
    def num_events(self) -> int:
        return len(self._ends)

    def add(self, events: bytes) -> bytes:
        """Keeps the events, and returns them with their ids; without ids once the journal has been dropped."""
        if self._is_dropped or not events:
            return events
        begin = len(self._events)
        for event in events.removesuffix(END).split(END):
            self._events += b"id: %s-%d\n%s\n\n" % (self.name.encode(), len(self._ends) + 1, event)
            self._ends.append(len(self._events))
        added = bytes(self._events[begin:])
        self._on_growth(len(added) + INDEX_BYTES * added.count(END))
        return added

    def after(self, number: int) -> Iterator[bytes]:
        """The events after this one, 0 for all, in slices."""
        begin = self._ends[number - 1] if number else 0
        while begin < len(self._events):
            end = begin + SLICE_BYTES
            yield bytes(self._events[begin:end])
            begin = end

    def drop(self) -> None:
        """Forget the events, and keep no further ones."""
        self._is_dropped = True
        self._events, self._ends = bytearray(), array("Q")
