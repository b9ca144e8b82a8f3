"""The requests that wait for a slot, and the order in which they get one.

Requests that former ranks or another engine have begun come first, in their old order, and one whose adapter waits for a place
(`Admission`). Then the lowest priority number. Within a priority, the next request is the oldest one of the owner with the
fewest running sequences; of several such owners, of the one that has been served least by its virtual token counter (Sheng et
al., "Fairness in Serving Large Language Models", OSDI 2024). Each priority has counters of its own: service at one priority
does not count at another. The counter of an owner that returns after a pause is lifted to the lowest of those that wait, so
that a pause gains no service. One owner cannot fill the queue where other owners are known: a share of the remaining capacity
stays free (the dynamic thresholds of Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
IEEE/ACM Transactions on Networking, 1998). Where the queue is full, the last request of the owner with the most gives way.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Final

from llama_core.scheduling.request import BACKGROUND, Sequence

# The weights of that paper: a sampled token costs a row of a step with few rows, a prompt's token a row among many.
PROMPT_COST: Final = 1
OUTPUT_COST: Final = 2
MAX_IDLE_OWNERS: Final = 10_000  # whose counters are kept while none of their requests wait
# An owner may have this many times the capacity that is free: alone in the queue four fifths, two such owners four ninths each.
TIMES_FREE_CAPACITY: Final = 4


class _PriorityClass:
    """The waiting requests of one priority by owner, oldest first, and the owners' virtual token counters."""

    def __init__(self) -> None:
        self.by_owner: dict[str, OrderedDict[Sequence, int]] = {}  # with each request's counted tokens
        self.counters: dict[str, float] = {}  # of owners that wait, and of others above the floor
        self.floor = 0.0  # no waiting owner's counter is lower

    def add(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether none of the owner's requests waited before."""
        waiting = self.by_owner.get(seq.terms.owner)
        is_new = waiting is None
        if waiting is None:
            waiting = self.by_owner[seq.terms.owner] = OrderedDict()
            self.counters[seq.terms.owner] = max(self.counters.get(seq.terms.owner, 0.0), self.floor)
        waiting[seq] = num_tokens
        return is_new

    def remove(self, seq: Sequence) -> int:
        """Remove `seq`. Returns its counted tokens."""
        waiting = self.by_owner[seq.terms.owner]
        num_tokens = waiting.pop(seq)
        if not waiting:
            del self.by_owner[seq.terms.owner]
        return num_tokens

    def first(self, num_running: Mapping[str, int]) -> Sequence:
        self._lift_floor()
        owner = min(self.by_owner, key=lambda owner: self._turn(owner, num_running))
        return next(iter(self.by_owner[owner]))

    def in_turn(self, num_running: Mapping[str, int], of_each: int | None) -> Iterator[Sequence]:
        if self.by_owner:
            self._lift_floor()
        for owner in sorted(self.by_owner, key=lambda owner: self._turn(owner, num_running)):
            yield from islice(self.by_owner[owner], of_each)

    def _lift_floor(self) -> None:
        self.floor = max(self.floor, min(self.counters[owner] for owner in self.by_owner))

    def _turn(self, owner: str, num_running: Mapping[str, int]) -> tuple[int, float]:
        return num_running.get(owner, 0), self.counters[owner]

    def evict_idle(self, *, above_floor: bool) -> None:
        """Drop the counters of owners without waiting requests: those below the floor, or all of them."""
        self.counters = {
            owner: counter
            for owner, counter in self.counters.items()
            if owner in self.by_owner or (counter > self.floor and not above_floor)
        }


class WaitingQueue:
    """The waiting requests in the order of the module's docstring. length: how many, of which num_background are background
    requests. num_tokens: of those that never ran. num_expected: tokens that the other requests are expected to compute."""

    def __init__(self) -> None:
        self.num_tokens = 0  # as counted on arrival
        self.num_expected = 0
        self._prompts: dict[int, list[int]] = {}  # the waiting sequences' expected tokens, by prompt_key
        self.length = self.num_background = 0
        # Each owner's requests but begun ones, and their counted tokens.
        self._waiting_of: dict[str, tuple[int, int]] = {}
        self._begun: OrderedDict[Sequence, None] = OrderedDict()
        self._classes: dict[int, _PriorityClass] = {}  # by priority; one without waiting requests keeps its counters

    def __len__(self) -> int:
        return self.length

    @property
    def is_background(self) -> bool:
        """Whether no other than background requests wait."""
        return self.length == self.num_background

    def background(self) -> Iterator[Sequence]:
        parts = (part for priority, part in self._classes.items() if priority >= BACKGROUND)
        return (seq for part in parts for waiting in part.by_owner.values() for seq in waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """The begun requests, then the others by priority and owner: not in the order of their turns."""
        yield from self._begun
        for priority in sorted(self._classes):
            for waiting in self._classes[priority].by_owner.values():
                yield from waiting

    def add(self, seq: Sequence, *, first: bool = False) -> None:
        """Add a new request after its owner's others, a preempted one before them. first: before them too."""
        num_tokens = seq.length if seq.num_cached is None else 0
        part = self._class(seq.terms.priority)
        if part.add(seq, num_tokens):
            self._evict_idle_owners()
        if first or seq.num_cached is not None:
            part.by_owner[seq.terms.owner].move_to_end(seq, last=False)
        self._count_waiting(seq.terms.owner, 1, num_tokens)
        self._count_expected(seq, 1)

    def add_first(self, seq: Sequence) -> None:
        """Add a request before all others: one that former ranks or another engine have begun, or one that keeps its turn. A
        background request comes before its owner's alone."""
        if seq.terms.is_background:
            return self.add(seq, first=True)
        self._begun[seq] = None
        self._begun.move_to_end(seq, last=False)
        self.length += 1
        self._count_expected(seq, 1)

    def has_capacity(self, owner: str, num_free: int | None, num_free_tokens: int | None) -> bool:
        """Whether the queue's free capacity, in requests and in tokens (None: no limit), is open to `owner`. All of it is if no
        other owner is known, or without an owner.
        """
        if not owner or all(part.counters.keys() <= {owner} for part in self._classes.values()):
            return True
        waiting = self._waiting_of.get(owner, (0, 0))
        return all(
            free is None or mine <= 0 or mine < TIMES_FREE_CAPACITY * free
            for mine, free in zip(waiting, (num_free, num_free_tokens), strict=True)
        )

    def last_of_largest(
        self, owner: str, num_more: int, without: Collection[Sequence], *, by_tokens: bool
    ) -> list[Sequence]:
        """The last request of the owner with the most waiting sequences, or the most tokens of them, all its sequences: it may
        give way to `num_more` of `owner`, which then has no more. An owner whose requests have all begun is passed over. []
        if there is none. without: sequences that give way already."""
        sizes = Counter({one: size[by_tokens] for one, size in self._waiting_of.items()})
        for seq in self._begun:
            if not seq.progress.has_begun and seq not in without:  # it waits for its adapter's place
                sizes[seq.terms.owner] += seq.length if by_tokens else 1
        for seq in without:
            if seq not in self._begun:
                sizes[seq.terms.owner] -= (seq.length if seq.num_cached is None else 0) if by_tokens else 1
        most = sizes[owner] + num_more
        for largest, size in sizes.most_common():
            if size <= most:
                break
            if not largest:
                continue
            for priority in sorted(self._classes, reverse=True):
                waiting = self._classes[priority].by_owner.get(largest, OrderedDict())
                for seq in reversed(waiting):
                    if not seq.progress.has_begun and seq not in without:
                        return [other for other in (*self._begun, *waiting) if other.progress is seq.progress]
        return []

    def tokens_behind(self, num_free: int, without: Collection[Sequence]) -> int:
        """Tokens of the requests that still wait when the first `num_free` have found a slot. without: do not count these."""
        if self.length - len(without) <= num_free:
            return 0
        first = islice((seq for seq in self if seq not in without), num_free)
        gone = [seq for seq in (*first, *without) if seq.num_cached is None and seq not in self._begun]
        return self.num_tokens - sum(seq.length for seq in gone)

    def remove(self, seq: Sequence) -> None:
        """Remove `seq`, which must be waiting."""
        if seq in self._begun:
            del self._begun[seq]
            self.length -= 1
        else:
            self._count_waiting(seq.terms.owner, -1, -self._classes[seq.terms.priority].remove(seq))
        self._count_expected(seq, -1)

    def first(self, num_running: Mapping[str, int]) -> Sequence:
        """The next request. num_running: each owner's running sequences. The queue must not be empty."""
        if self._begun:
            return next(iter(self._begun))
        return self._classes[min(priority for priority, part in self._classes.items() if part.by_owner)].first(
            num_running
        )

    def in_turn(self, num_running: Mapping[str, int], of_each: int | None = None) -> Iterator[Sequence]:
        """The requests as their owners' turns are now: all of an owner, or the first `of_each`, then those of the next one."""
        yield from self._begun
        for priority in sorted(self._classes):
            yield from self._classes[priority].in_turn(num_running, of_each)

    def count_served(self, seq: Sequence, cost: float) -> None:
        """Add `cost` to the virtual token counter of the owner of `seq`, at its priority."""
        part = self._classes.get(seq.terms.priority) or self._class(seq.terms.priority)
        part.counters[seq.terms.owner] = part.counters.get(seq.terms.owner, part.floor) + cost

    def _class(self, priority: int) -> _PriorityClass:
        part = self._classes.get(priority)
        if part is None:
            part = self._classes[priority] = _PriorityClass()
        return part

    def _count_expected(self, seq: Sequence, sign: int) -> None:
        """Of equal prompts, which several fronts may send at once, one is computed."""
        if seq.terms.is_background:
            self.num_background += sign
            return
        if sign > 0:
            seq.num_expected = seq.num_expected or seq.length
            seq.prompt_key = hash((seq.terms.cache_scope, seq.terms.adapter, *seq.prompt))
        equal = self._prompts.setdefault(seq.prompt_key, [])
        self.num_expected -= max(equal) + len(equal) - 1 if equal else 0
        (equal.append if sign > 0 else equal.remove)(seq.num_expected)
        self.num_expected += max(equal) + len(equal) - 1 if equal else 0
        if not equal:
            del self._prompts[seq.prompt_key]

    def _count_waiting(self, owner: str, num_sequences: int, num_tokens: int) -> None:
        self.length += num_sequences
        self.num_tokens += num_tokens
        sequences, tokens = self._waiting_of.pop(owner, (0, 0))
        if sequences + num_sequences:
            self._waiting_of[owner] = (sequences + num_sequences, tokens + num_tokens)

    def _evict_idle_owners(self) -> None:
        """Bound the number of counters of owners without waiting requests."""
        parts = self._classes.values()
        for above_floor in (False, True):
            if sum(len(part.counters) - len(part.by_owner) for part in parts) > MAX_IDLE_OWNERS:
                for part in parts:
                    part.evict_idle(above_floor=above_floor)
