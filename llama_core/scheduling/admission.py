"""Decides which waiting sequences get a slot and cache blocks, and how many may wait.

The next sequence of the queue is admitted when a slot is free and its known tokens fit into free blocks. While it waits only
for older prompts, those with much shorter prompts overtake it (`admit_before`). No other does, unless no place for its adapter
is free. Then it stays first until one is, and those for which a row of OVERTAKING holds overtake it. A sequence's prefix is
looked up in the cache when it is admitted, not before. Knows nothing of steps and their budget.

Owners share what runs. Where the next sequence lacks a slot or blocks, and some owners run at least two sequences more than
its owner, the newest sequence of the owner that runs most is preempted, at most one a step, and waits before its owner's
others; never for a sequence of a lower priority. A preemption brings the two owners closer and never past each other, so it
is not reversed: without arrivals and ends there are fewer of them than slots. An owner's oldest sequences, up to its share,
are never chosen. A single owner loses nothing. Adapters' places are shared alike, but all sequences of one adapter make way.

Background sequences run only while no other is live: the first other one preempts all of them. So they hold nothing that it may
need, and run beside none.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Final, NamedTuple

from llama_core.errors import InvalidParameter, QueueFull
from llama_core.model.operations import FULL_ATTENTION
from llama_core.scheduling.adapter_places import AdapterPlaces
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.fair_queue import PROMPT_COST, WaitingQueue
from llama_core.scheduling.prefix_cache import PrefixCache
from llama_core.scheduling.prompt_budget import overtakes
from llama_core.scheduling.quarantine import Quarantine
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.sliding_window import SlidingWindow

# Waiting sequences that a step looks at for one that may overtake: of each owner, and of all.
LOOK_AHEAD_OF_OWNER: Final = 8
LOOK_AHEAD: Final = 64


def adapters_by_owner(running: Seq[Sequence]) -> dict[str, set[str]]:
    """The adapters of each owner's running sequences."""
    adapters = defaultdict[str, set[str]](set)
    for seq in running:
        if seq.terms.adapter:
            adapters[seq.terms.owner].add(seq.terms.adapter)
    return adapters


def are_background(running: Seq[Sequence]) -> bool:
    """Whether no other than background sequences run. None runs beside others."""
    return not running or running[0].terms.is_background


class _Pair(NamedTuple):
    """A waiting sequence whose adapter has a place, if it has one, and the first of the queue, whose adapter has none. used:
    adapters that run, by owner. num_passed: sequences with adapters that were admitted since the first lacks a place."""

    seq: Sequence
    first: Sequence
    used: Mapping[str, set[str]]
    num_passed: int
    num_slots: int

    @property
    def are_peers(self) -> bool:
        return self.seq.terms.priority == self.first.terms.priority


def _needs_no_place(pair: _Pair) -> bool:
    return not pair.seq.terms.adapter


def _has_tokens(pair: _Pair) -> bool:
    return pair.seq.length > pair.seq.prompt_len


def _has_priority(pair: _Pair) -> bool:
    return pair.seq.terms.priority < pair.first.terms.priority


def _is_of_an_owner_with_no_more_places(pair: _Pair) -> bool:
    own, others = pair.seq.terms, pair.first.terms
    is_least = len(pair.used[own.owner] | {own.adapter}) <= len(pair.used[others.owner])
    return pair.are_peers and own.owner != others.owner and is_least


def _is_one_of_few(pair: _Pair) -> bool:
    """As many as there are slots, unless the first has tokens."""
    is_new = pair.first.length == pair.first.prompt_len
    return pair.are_peers and is_new and pair.num_passed < pair.num_slots


# Who may overtake a sequence that waits for its adapter's place: those for which one of these holds.
OVERTAKING: Final = (
    _needs_no_place,
    _has_tokens,
    _has_priority,
    _is_of_an_owner_with_no_more_places,
    _is_one_of_few,
)


class Admission:
    """The waiting queue, the free slots, and the blocks of `pool`."""

    def __init__(
        self,
        pool: BlockPool,
        quarantine: Quarantine,
        *,
        num_slots: int,
        max_waiting: int | None,
        max_waiting_tokens: int | None,
        prefix_caching: bool,
        window: SlidingWindow,
        adapter_places: AdapterPlaces,
    ) -> None:
        self.waiting = WaitingQueue()
        self.num_prefix_hits = 0  # tokens found in the cache instead of computed
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self._quarantine = quarantine
        self._adapter_places = adapter_places
        self._num_slots = num_slots
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._prefix_caching = prefix_caching
        self._window = window
        self.has_window = window.size != FULL_ATTENTION  # whether `release_behind_window` ever releases a block
        self._head_lacks_blocks = False  # no block has been released since the next sequence was refused
        self._lacks_place: Sequence | None = None  # the first of the queue, when no place was free for its adapter
        self._num_adapted = 0  # sequences with adapters that were admitted since then
        self.use_pool(pool)

    def limit(self, max_waiting: int | None, max_waiting_tokens: int | None) -> None:
        """How many sequences, and tokens of them, may wait from now on."""
        self._max_waiting, self._max_waiting_tokens = max_waiting, max_waiting_tokens

    def use_pool(self, pool: BlockPool) -> None:
        """From now on sequences get blocks of `pool`; none may hold a block of the former pool."""
        assert pool.block_size == self._window.block_size
        self.pool = pool
        self.prefixes = PrefixCache(pool.prefixes, self._window, is_enabled=self._prefix_caching)
        self._head_lacks_blocks = False

    def victims(self, lengths: Seq[int], owner: str, *, is_background: bool = False) -> list[Sequence]:
        """The waiting sequences that have to give way, so that a request whose sequences have this many tokens each may be
        queued as a whole. Raises QueueFull if the capacity is taken now, InvalidParameter if no idle server could ever take it.

        A sequence that finds a free slot does not wait; a sequence that waits alone may be of any length. Background sequences
        count for one another alone.
        """
        gone = dict.fromkeys(() if is_background else self.waiting.background())  # a set in their order
        num_behind = len(gone)
        while (exceeded := self._exceeded(lengths, owner, gone)) is not None:
            limit, by_tokens = exceeded
            last = self.waiting.last_of_largest(owner, sum(lengths), gone, by_tokens=True) if by_tokens else []
            last = last or self.waiting.last_of_largest(owner, len(lengths), gone, by_tokens=False)
            if not last:
                raise QueueFull(limit)
            gone |= dict.fromkeys(last)
        return list(gone)[num_behind:]

    def _exceeded(self, lengths: Seq[int], owner: str, victims: Collection[Sequence]) -> tuple[str, bool] | None:
        """The limit that the request would exceed without the victims, and whether it is the one of tokens. Raises what
        `victims` raises."""
        num_waiting, num_free = self.waiting.length - len(victims), len(self.free_slots)
        if num_waiting + len(lengths) <= num_free:
            return None
        self._check_fits_idle(lengths)
        capacity = None if self._max_waiting is None else self._max_waiting + num_free - num_waiting
        if capacity is not None and len(lengths) > capacity:
            num_queued = max(0, num_waiting - num_free)
            return f"{num_queued} sequences wait already, the limit is {self._max_waiting}", False
        capacity_tokens = None
        if self._max_waiting_tokens is not None:
            queued_tokens = self.waiting.tokens_behind(num_free, victims)
            capacity_tokens = self._max_waiting_tokens - queued_tokens
            queued_here = lengths[max(0, num_free - num_waiting) :]
            if (queued_tokens or len(queued_here) > 1) and sum(queued_here) > capacity_tokens:
                return (
                    f"sequences of {queued_tokens} tokens wait already, the limit is {self._max_waiting_tokens}",
                    True,
                )
        if not self.waiting.has_capacity(owner, capacity, capacity_tokens):
            raise QueueFull("most waiting requests are of this key or user; the remaining capacity is for others")
        return None

    def queue(self, seq: Sequence) -> None:
        self.waiting.add(seq)
        self._head_lacks_blocks = False  # another sequence may be first now

    def queue_first(self, seq: Sequence) -> None:
        """Queue a sequence that former ranks or another engine have begun, or the canary, before all others."""
        self.waiting.add_first(seq)
        self._head_lacks_blocks = False

    def leave_queue(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self._head_lacks_blocks = False

    def admit_next(self, running: Seq[Sequence]) -> Sequence | None:
        """The next sequence, with a slot and blocks for all its known tokens, or as many as it ever holds; None if it cannot
        be admitted now."""
        if not (self.waiting.length and self.free_slots) or self._head_lacks_blocks:
            return None
        seq = self._next(running, Counter(other.terms.owner for other in running))
        if seq is None or not self._may_run(seq, running):
            return None
        if not self._admit(seq, running, self.prefixes.lookup(seq)):
            self._head_lacks_blocks = True
            return None
        return seq

    def admit_before(self, older: Sequence, running: Seq[Sequence]) -> Sequence | None:
        """`admit_next`, of the sequences whose prompts may be computed before the rest of `older`, a running one. One whose
        prefix is being computed waits for it."""
        if not (self.waiting.length and self.free_slots) or self._head_lacks_blocks:
            return None
        num_running = Counter(other.terms.owner for other in running)
        places = self._adapter_places
        if places.has_place(first := self.waiting.first(num_running), running):
            turns = self.waiting.in_turn(num_running, LOOK_AHEAD_OF_OWNER)
        else:
            turns = self._overtaking(first, running, num_running)
        for seq in islice(turns, LOOK_AHEAD):
            if not places.has_place(seq, running):
                continue
            cached = self.prefixes.lookup(seq)
            is_before = overtakes(seq, seq.length - len(cached) * self.pool.block_size, older)
            if is_before and self._may_run(seq, running) and not self.prefixes.is_coming(seq, len(cached), running):
                return seq if self._admit(seq, running, cached) else None
        return None

    def _admit(self, seq: Sequence, running: Seq[Sequence], cached: list[int]) -> bool:
        """Take a waiting sequence from the queue into a slot. False if it lacks blocks. cached: those of its prefix."""
        num_released = self._window.num_behind(len(cached) * self.pool.block_size)
        num_held = min(self.pool.blocks_for(seq.length) - num_released, self._window.num_held(seq.length))
        needed, shared = num_held - (len(cached) - num_released), cached[num_released:]
        # Reserve a block for each running sequence; otherwise the new sequence would be preempted first.
        blocks = self.pool.try_allocate(needed, shared=shared, reserve=len(running))
        if blocks is None:
            return False
        self.waiting.remove(seq)
        seq.progress.has_begun = True
        self._num_adapted += bool(seq.terms.adapter)
        seq.slot = self.free_slots.pop()
        seq.blocks = cached + blocks
        seq.num_registered, seq.num_released = len(cached), num_released
        seq.scheduled = len(cached) * self.pool.block_size
        self.num_prefix_hits += seq.scheduled
        if seq.num_cached is None:  # else the sequence ran before, and its prompt was counted then
            self.waiting.count_served(seq, PROMPT_COST * (seq.length - seq.scheduled))
            seq.num_cached = seq.scheduled
        return True

    def preemptible_for_place(self, running: Seq[Sequence]) -> list[Sequence]:
        """The running sequences to preempt for a waiting one, which is the next then and lacks a place for its adapter: all
        those of one adapter, in the order of admission. [] unless its owner is due a place."""
        by_adapter: dict[str, list[Sequence]] = {}
        for seq in running if self._adapter_places.num_places else ():
            if seq.terms.adapter:
                by_adapter.setdefault(seq.terms.adapter, []).append(seq)
        if not by_adapter or len(by_adapter) < self._adapter_places.num_places:
            return []
        used = adapters_by_owner(running)
        with_adapters = (seq.terms for seq in reversed(running) if seq.terms.adapter)
        kept = {terms.owner: terms.adapter for terms in with_adapters}  # by the owner's oldest sequence
        for seq in self.waiting.in_turn(Counter(other.terms.owner for other in running), 1):
            if not seq.terms.adapter or seq.terms.adapter in by_adapter or not self._may_run(seq, running):
                continue
            groups = [
                group
                for adapter, group in reversed(by_adapter.items())  # the newest first
                if len({other.terms.owner for other in group}) == 1
                and kept[group[0].terms.owner] != adapter
                and len(used[group[0].terms.owner]) >= len(used[seq.terms.owner]) + 2
                and min(other.terms.priority for other in group) >= seq.terms.priority
            ]
            if groups:
                self.waiting.remove(seq)
                self.waiting.add_first(seq)
                return min(groups, key=lambda group: (-len(used[group[0].terms.owner]), len(group)))
        return []

    def preemptible_for_next(self, running: Seq[Sequence]) -> Sequence | None:
        """The running sequence to preempt for the next one, which lacks a slot or blocks; None unless its owner is due one."""
        if not self.waiting.length or (self.free_slots and not self._head_lacks_blocks):
            return None
        num_running = Counter(seq.terms.owner for seq in running)
        most = max(num_running.values(), default=0)
        if most < 2 or (first := self._next(running, num_running)) is None:
            return None
        least = num_running[first.terms.owner] + 2
        if most < least or not self._may_run(first, running):
            return None
        others = (seq for seq in reversed(running) if seq.terms.priority >= first.terms.priority)
        victim = max(others, key=lambda seq: num_running[seq.terms.owner], default=None)
        return victim if victim is not None and num_running[victim.terms.owner] >= least else None

    def release_behind_window(self, seq: Sequence) -> None:
        """Release the blocks that no row of the sequence from `seq.scheduled` on reads. Rows of earlier steps may still read
        them on the ranks, which run steps in order; a row of the step being made may not."""
        # Samples in flight may be deferred, and then positions before them are computed again.
        start = seq.scheduled - seq.inflight if seq.params.grammar else seq.scheduled
        # A block is released when it is registered: the tokens of the last blocks may not have been read back.
        num_behind = min(self._window.num_behind(start), seq.length // self.pool.block_size)
        if num_behind > seq.num_released:
            self.prefixes.register(seq)
            self.pool.release(seq.blocks[seq.num_released : num_behind])
            seq.num_released = num_behind
            self._head_lacks_blocks = False

    def vacate(self, seq: Sequence) -> None:
        """Take back the slot and the blocks of a sequence that has ended or is preempted."""
        assert seq.slot is not None
        if seq.finish_reason is FinishReason.ERROR:
            self.prefixes.evict(seq)  # its keys and values may be wrong
        else:
            self.prefixes.register(seq)
        self.pool.release(seq.held_blocks)
        self.free_slots.append(seq.slot)
        seq.blocks = []
        seq.num_registered = seq.num_released = 0
        seq.slot = None
        self._head_lacks_blocks = False

    def _next(self, running: Seq[Sequence], num_running: Counter[str]) -> Sequence | None:
        """The first sequence of the queue, or the next one that may overtake it."""
        first, places = self.waiting.first(num_running), self._adapter_places
        if places.has_place(first, running):
            self._lacks_place = None
            return first
        return next(self._overtaking(first, running, num_running), None)

    def _overtaking(self, first: Sequence, running: Seq[Sequence], num_running: Counter[str]) -> Iterator[Sequence]:
        """The sequences that may overtake the first one, which lacks a place."""
        if first is not self._lacks_place:
            self.waiting.remove(first)
            self.waiting.add_first(first)
            self._lacks_place, self._num_adapted = first, 0
        used, held = adapters_by_owner(running), {"", *self._adapter_places.held}

        def may_overtake(seq: Sequence) -> bool:
            pair = _Pair(seq, first, used, self._num_adapted, self._num_slots)
            return seq.terms.adapter in held and any(holds(pair) for holds in OVERTAKING)

        return filter(may_overtake, self.waiting.in_turn(num_running))

    def _may_run(self, seq: Sequence, running: Seq[Sequence]) -> bool:
        if seq.terms.is_background and not (self.waiting.is_background and are_background(running)):
            return False
        # Of a sequence that was preempted in mid-step, the sampled token has not been read back.
        return not seq.inflight and self._quarantine.admits(seq, running)

    def _check_fits_idle(self, lengths: Seq[int]) -> None:
        slots, most, most_tokens = self._num_slots, self._max_waiting, self._max_waiting_tokens
        if most is not None and len(lengths) > slots + most:
            raise InvalidParameter.of(
                "n",
                f"the request has {len(lengths)} choices (prompts * n); at most {slots + most} can be taken at once: "
                f"{slots} that run (max_batch_size) and {most} that wait (max_queue)",
            )
        num_tokens = sum(lengths[slots:])
        if most_tokens is not None and len(lengths) > slots + 1 and num_tokens > most_tokens:
            raise InvalidParameter.of(
                "prompt",
                f"{len(lengths) - slots} choices of {num_tokens} prompt tokens would wait behind the {slots} that run; "
                f"at most {most_tokens} tokens can wait (max_queue_tokens)",
            )
