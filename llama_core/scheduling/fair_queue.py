"""Who waits for a slot, and who is next.

First those that ran before and were sent back, in the order in which they are to run again. Then by priority, the lowest
number first. Among equals, owners take turns by what they were given: the next is the first in line of the owner that has
been served least, in tokens (the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024). Who comes back after a pause is set level with those who wait, so that nobody can save up. Nor can one owner fill the
queue where there are others: a share of the room that is left stays free (the dynamic thresholds of Choudhury and Hahne,
"Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM Transactions on Networking, 1998). Every
operation is O(log of the owners who wait).
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Final

from llama_core.scheduling.request import Sequence

# A generated token costs a row of a step that is read for few rows, a prompt's token one of many: the weights of that paper.
PROMPT_COST: Final = 1
OUTPUT_COST: Final = 2
MOST_OWNERS: Final = 10_000  # that are remembered while nothing of them waits
# An owner may have so many times what is free. One who asks for all there is has four fifths, two have four ninths each.
TIMES_WHAT_IS_FREE: Final = 4


class _Line:
    """Those of one priority: for each owner its own, in the order in which they came, and a heap of what owners were given."""

    def __init__(self) -> None:
        self.by_owner: dict[str, OrderedDict[Sequence, int]] = {}  # and the tokens that it was counted with
        self.heap: list[tuple[float, int, str]] = []  # given when it was pushed, a number, the owner
        self.in_heap: set[str] = set()


class WaitingQueue:
    def __init__(self) -> None:
        self.num_tokens = 0  # of all who never ran, known when they came
        self._length = 0
        self._held: dict[str, tuple[int, int]] = {}  # of these, how many are each owner's, and their tokens
        self._sent_back: OrderedDict[Sequence, None] = OrderedDict()
        self._lines: dict[int, _Line] = {}
        self._given: dict[str, float] = {}  # cost of what each owner was given
        self._level = 0.0  # what the owner that was last next had been given: nobody who waits has less
        self._numbers = count()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Those that were sent back, then the others by priority and owner: not in the order of their turns."""
        yield from self._sent_back
        for priority in sorted(self._lines):
            for waiting in self._lines[priority].by_owner.values():
                yield from waiting

    def add(self, seq: Sequence) -> None:
        line = self._lines.setdefault(seq.priority, _Line())
        waiting = line.by_owner.get(seq.owner)
        if waiting is None:
            waiting = line.by_owner[seq.owner] = OrderedDict()
            given = self._given[seq.owner] = max(self._given.get(seq.owner, 0.0), self._level)
            if seq.owner not in line.in_heap:
                line.in_heap.add(seq.owner)
                heappush(line.heap, (given, next(self._numbers), seq.owner))
            self._forget_some()
        waiting[seq] = seq.length
        self._count(seq.owner, 1, seq.length)

    def add_first(self, seq: Sequence) -> None:
        """Before all others: it ran already."""
        self._sent_back[seq] = None
        self._sent_back.move_to_end(seq, last=False)
        self._length += 1

    def may_add(self, owner: str, room: int | None, room_tokens: int | None) -> bool:
        """Whether the queue's `room`, in sequences and in tokens (None: without end), is for `owner` too. Without any other
        owner all of it is, and who has no name is nobody's neighbour.
        """
        if not owner or self._given.keys() <= {owner}:
            return True
        held = self._held.get(owner, (0, 0))
        return all(
            free is None or mine <= 0 or mine < TIMES_WHAT_IS_FREE * free
            for mine, free in zip(held, (room, room_tokens), strict=True)
        )

    def remove(self, seq: Sequence) -> None:
        """Of one who waits."""
        if seq in self._sent_back:
            del self._sent_back[seq]
            self._length -= 1
        else:
            line = self._lines[seq.priority]
            waiting = line.by_owner[seq.owner]
            num_tokens = waiting.pop(seq)
            if not waiting:
                del line.by_owner[seq.owner]  # its place in the heap is passed over when it comes up
            if not line.by_owner:
                del self._lines[seq.priority]
            self._count(seq.owner, -1, -num_tokens)

    def first(self) -> Sequence:
        """Who is next; somebody must wait."""
        if self._sent_back:
            return next(iter(self._sent_back))
        line = self._lines[min(self._lines)]
        while True:
            given, number, owner = line.heap[0]
            if owner not in line.by_owner:
                heappop(line.heap)
                line.in_heap.remove(owner)
            elif given < self._given[owner]:
                heapreplace(line.heap, (self._given[owner], number, owner))
            else:
                self._level = max(self._level, given)
                return next(iter(line.by_owner[owner]))

    def charge(self, owner: str, cost: float) -> None:
        """`owner` was given something."""
        self._given[owner] = self._given.get(owner, self._level) + cost

    def _count(self, owner: str, num_sequences: int, num_tokens: int) -> None:
        self._length += num_sequences
        self.num_tokens += num_tokens
        sequences, tokens = self._held.pop(owner, (0, 0))
        if sequences + num_sequences:
            self._held[owner] = (sequences + num_sequences, tokens + num_tokens)

    def _forget_some(self) -> None:
        """Of owners of whom nothing waits, those who would be set level anyway, and if need be the others."""
        if len(self._given) <= MOST_OWNERS:
            return
        wait = {owner for line in self._lines.values() for owner in line.by_owner}
        self._given = {owner: given for owner, given in self._given.items() if owner in wait or given > self._level}
        if len(self._given) > MOST_OWNERS + len(wait):
            self._given = {owner: given for owner, given in self._given.items() if owner in wait}
