"""Operations on a scheduler, in any order, and the rules that hold after each: used by the fuzz command and by its tests.

The ranks are fakes that define every token by those before it, so a sequence's text is known in advance.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from llama_core.errors import InvalidParameter, PoisonRequest, QueueFull, RankFailure
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.fair_queue import WaitingQueue
from llama_core.scheduling.request import BACKGROUND, FinishReason, RequestProgress, Sequence, Terms
from llama_core.scheduling.sampling_params import Pooling, SamplingParams, mix_seed
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.sliding_window import SlidingWindow
from llama_core.scheduling.step import StepInput, StepOutput
from tests.support.fake_ranks import (
    EOS,
    FakeRanks,
    Model,
    Oracle,
    adapted,
    arbitrary,
    embedding_of,
    expected_output,
    repetitive,
)

BLOCK_SIZE = 4
MAX_LENGTH = 28  # of a sequence
PREFIXES: tuple[list[int], ...] = ([], [5] * 9, list(range(10, 19)), [7, 8] * 6)
ADAPTERS = ("a", "b", "c")  # more than the ranks hold at once
OWNERS = ("", "a", "b", "c")
PRIORITIES = (0, 0, 1, 2)


@dataclass(frozen=True)
class World:
    """The configuration of a scheduler and of its ranks."""

    num_blocks: int = 12
    slots: int = 3
    extra_tokens: int = 6  # of a step, in addition to one for each slot
    depth: int = 2
    max_drafts: int = 4
    prefix_caching: bool = True
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    model: Model = arbitrary
    window: int = 0  # positions that a position attends to; 0: all
    deferrals: float = 0.0  # of rows with a grammar
    priorities: tuple[int, ...] = PRIORITIES

    @staticmethod
    def random(draw: Random) -> "World":
        window, slots, extra_tokens = draw.choice((0, 0, 1, 3, 4, 6, 9, 13)), draw.randint(1, 5), draw.randint(0, 12)
        least = SlidingWindow.of(window, BLOCK_SIZE, slots + extra_tokens).num_held(MAX_LENGTH)
        return World(
            num_blocks=draw.randint(least, 20),
            slots=slots,
            extra_tokens=extra_tokens,
            depth=draw.randint(1, min(3, slots + extra_tokens)),  # a window has room for one row's positions in flight
            max_drafts=draw.choice((0, 4, 8)),
            prefix_caching=draw.random() < 0.75,
            max_waiting=draw.choice((None, None, 2, 8)),
            max_waiting_tokens=draw.choice((None, None, 40, 200)),
            model=draw.choice((arbitrary, repetitive)),
            window=window,
            deferrals=draw.choice((0.0, 0.2, 0.6)),
            priorities=draw.choice((PRIORITIES, PRIORITIES, (0, 1, BACKGROUND, BACKGROUND))),
        )


@dataclass(eq=False, slots=True)
class Heard:
    """A client's view of a sequence: the tokens delivered so far, and all expected tokens."""

    seq: Sequence
    expected: list[int]
    number: int  # in the order of arrival
    tokens: list[int]
    reason: FinishReason | None = None
    is_cut: bool = False  # it ended by a stop string, an abort or an error, with a prefix of the expected tokens


class Bench:
    """A scheduler, its fake ranks, and the clients that wait for tokens."""

    def __init__(self, world: World) -> None:
        self.world = world
        config = SchedulerConfig(
            max_batch_size=world.slots,
            max_step_tokens=world.slots + world.extra_tokens,
            stop_ids=frozenset({EOS}),
            max_waiting=world.max_waiting,
            max_drafts=world.max_drafts,
            prefix_caching=world.prefix_caching,
            max_waiting_tokens=world.max_waiting_tokens,
            window=world.window,
            max_loras=2,
        )
        self.scheduler = Scheduler(config, BlockPool(world.num_blocks, BLOCK_SIZE))
        self.scheduler.adapter_places.folders |= dict.fromkeys(ADAPTERS, "")
        self.ranks = FakeRanks(BLOCK_SIZE, world.model, world.window, world.deferrals)
        self.in_flight: deque[tuple[StepInput, StepOutput]] = deque()
        self.heard: dict[Sequence, Heard] = {}  # live or just ended
        self.num_ended = self.num_deferrals = 0
        self.requests: dict[Sequence, set[Sequence]] = {}  # all sequences of each one's request
        self._begun: set[Sequence] = set()  # have been admitted
        self._numbers = 0
        queue = self.scheduler.admission.waiting
        first = queue.first

        def checked_first(num_running: Mapping[str, int]) -> Sequence:
            seq = first(num_running)
            self._check_turn(queue, seq)
            return seq

        queue.first = checked_first  # type: ignore[method-assign]

    # Operations.

    def add(
        self,
        prefix: int,
        own: list[int],
        max_new: int,
        *,
        n: int = 1,
        owner: str = "",
        priority: int = 0,
        ignore_eos: bool = False,
        prompt_logprobs: bool = False,
        seed: int = 0,
        oracle: bool = False,
        has_grammar: bool = False,
        adapter: str = "",
        pooling: Pooling = "",
    ) -> list[Sequence]:
        """Add a request of `n` choices: all or none."""
        prompt = (PREFIXES[prefix] + own)[: MAX_LENGTH - 1]
        sizes = self._sizes_waiting(priority)
        try:
            victims = self.scheduler.make_room([len(prompt)] * n, owner, is_background=priority == BACKGROUND)
        except (QueueFull, InvalidParameter) as error:
            self._check_refusal(n, len(prompt), owner, priority, is_for_ever=isinstance(error, InvalidParameter))
            return []
        gone = {seq for seq in self.heard if seq.finished}
        for seq in victims:
            assert isinstance(seq.error, QueueFull) and seq.terms.owner
            assert any(size[seq.terms.owner] > size[owner] for size in sizes), (
                "it gives way to an owner that has more waiting"
            )
            assert not self._begun & self.requests[seq], "a request that has begun gives way"
            assert {one for one in self.requests[seq] if one in self.heard} <= gone, "a part of a request gives way"
            self._ended(self.heard[seq])
        if pooling:
            max_new, prompt_logprobs, has_grammar, oracle = 0, False, False, False
        added, progress = [], RequestProgress()
        for index in range(n):
            params = SamplingParams(
                max_tokens=max_new,
                pooling=pooling,
                ignore_eos=ignore_eos,
                prompt_logprobs=prompt_logprobs,
                logprobs=0,
                seed=mix_seed(seed, index),
                grammar="a grammar" if has_grammar and not ignore_eos else "",
            )
            max_length = min(len(prompt) + max_new, MAX_LENGTH)
            seq = Sequence(prompt, params, max_length, Terms(owner, priority, adapter=adapter), progress)
            seq.drafting = Oracle(self.world.model, adapted(params.seed, adapter)) if oracle else None
            self._numbers += 1
            heard = Heard(seq, expected_output(seq, self.world.model), self._numbers, [])
            self.heard[seq] = heard
            self.scheduler.add(seq)
            if seq.finished:
                self._ended(heard)
            added.append(seq)
        self.requests |= {seq: set(added) for seq in added}
        return added

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Abort a sequence, as when its client disconnects. A sequence that has ended does not change."""
        was = seq.finish_reason
        self.scheduler.finish(seq, reason)
        assert seq.finish_reason is (was or reason)
        if was is None:
            self.heard[seq].is_cut = True
            self._ended(self.heard[seq])

    def schedule(self) -> bool:
        """Send one more step unless the pipeline is full. Returns whether there was one."""
        if len(self.in_flight) >= self.world.depth:
            return False
        # The last token of a sequence that generates nothing is one of its prompt.
        least = {seq: 1 + (seq.length < seq.max_length) for seq in self.scheduler._running if not seq.inflight}
        prompts = {seq: seq.num_pending for seq in least if seq.num_pending >= least[seq]}
        num_preemptions = self.scheduler.num_preemptions + self._is_due_a_place()
        if (batch := self.scheduler.schedule()) is None:
            return False
        assert self.scheduler.num_preemptions >= num_preemptions, "an owner keeps all places of adapters"
        self._check_prompts(batch, prompts)
        self._begun.update(seq for seq in self.scheduler._running)
        runs_background = any(seq.terms.is_background for seq in self.scheduler._running)
        has_others = any(not seq.terms.is_background for seq in self.scheduler.live())
        assert not (runs_background and has_others), "a background sequence runs while there are others"
        config = self.scheduler.config
        assert 0 < batch.num_tokens <= config.max_step_tokens, "a step over its limit of tokens"
        assert batch.num_samples <= config.max_batch_size + config.max_drafts, "a step over its limit of samples"
        assert batch.epoch == self.scheduler.epoch
        assert all(0 <= row.slot < config.max_batch_size and row.length > 0 for row in batch.rows)
        self.in_flight.append((batch, self.ranks.step(batch)))
        return True

    def commit(self, *, spoilt: int | None = None, stops: bool = False, sends_first: bool = False) -> None:
        """Commit the oldest output. `spoilt`: the logits of one of its samples are not finite. `stops`: the first sequence that
        gains tokens has reached its stop string, perhaps after the next step has been sent."""
        if not self.in_flight:
            return
        _, output = self.in_flight.popleft()
        if spoilt is not None and output.tokens:
            output = replace(output, non_finite=[spoilt % len(output.tokens)])
        self.num_deferrals += len(output.deferred)
        gained = self.scheduler.commit(output)
        if sends_first:
            self.schedule()
        for seq, tokens in gained.items():
            if seq is self.scheduler.quarantine.canary:
                continue
            heard = self.heard[seq]
            assert heard.reason is None, "a sequence that has ended gains tokens"
            heard.tokens += tokens
            assert seq.output == heard.tokens, "the delivered tokens are not the sequence's"
            assert heard.tokens == heard.expected[: len(heard.tokens)], "a token that the model did not sample"
            assert len(seq.logprobs) == len(heard.tokens), "each token has its own logprob"
            if stops and len(tokens) > 0:
                stops = False
                seq.cut(len(tokens) - 1)
                self.scheduler.finish(seq, FinishReason.STOP)
                heard.tokens = seq.output
                heard.is_cut = True
            if seq.finished:
                self._ended(heard)

    def fail(self, *, unsent: bool = False, raises: bool = False, num_blocks: int | None = None) -> None:
        """The ranks fail, perhaps with a step that was made and not sent; new ranks may have another number of blocks.

        raises: a rank reports the error itself, which raises a quarantined request's failure score by more.
        """
        if unsent and self.schedule():
            self.in_flight.pop()
            self.scheduler.drop_unsent()
        self.in_flight.clear()
        self.ranks = FakeRanks(BLOCK_SIZE, self.world.model, self.world.window, self.world.deferrals)
        before = list(self.scheduler.live())
        quarantine, earlier_canary = self.scheduler.quarantine, self.scheduler.quarantine.canary
        harmful = self.scheduler.restart(self.scheduler.epoch + 1, RankFailure("a rank failed", raised=raises))
        lost = set(before) - set(self.scheduler.live())
        assert lost <= {harmful, earlier_canary}, "a restart lost a sequence"
        assert set(self.scheduler.live()) - set(before) <= {quarantine.canary}, "a restart added a sequence"
        assert not self.scheduler.num_running and not self.scheduler._in_flight
        if harmful is not None:
            assert isinstance(harmful.error, PoisonRequest)
            self._ended(self.heard[harmful])
        if num_blocks is not None:
            self.scheduler.use_pool(BlockPool(num_blocks, BLOCK_SIZE))

    def limit_prompts(self, num_tokens: int) -> None:
        """Lower the prompt limit, as for slow ranks."""
        self.scheduler.prompt_budget.limit(num_tokens)

    def drain(self) -> None:
        """Without new requests every sequence ends, within the steps that the design allows: the sequence that runs longest is
        never preempted, and gains a token from every step unless it waits for its own output."""
        live = list(self.scheduler.live())
        left = sum(seq.max_length + 2 for seq in live) + len(self.in_flight) + 1
        while self.scheduler.has_work:
            assert left > 0, "a sequence starves"
            left -= 1
            while self.schedule():
                pass
            assert self.in_flight, "work waits, and no step is in flight"
            left += bool(self.in_flight[0][1].deferred)
            self.commit()
        self.check()
        assert not self.heard and self.scheduler.pool.num_used == 0, "ended sequences left state behind"

    # Rules.

    def _ended(self, heard: Heard) -> None:
        """Called once for every sequence."""
        seq = heard.seq
        assert heard.reason is None and seq.finish_reason is not None, "a sequence ends once"
        heard.reason = seq.finish_reason
        assert seq.slot is None and not seq.blocks, "its slot and blocks are free when it has ended"
        if seq.finish_reason is FinishReason.ERROR:
            heard.is_cut = True
        if not heard.is_cut:
            assert seq.output == heard.expected, "the text is not complete"
            if pooling := seq.params.pooling:
                assert seq.embedding == embedding_of(seq.prompt, pooling), "the embedding is of its own tokens"
            if seq.params.prompt_logprobs:
                assert [p.logprob for p in seq.prompt_logprobs] == list(range(1, seq.prompt_len))
        assert seq.output == heard.expected[: len(seq.output)]
        assert [p.logprob for p in seq.logprobs] == list(range(seq.prompt_len, seq.length))
        self.num_ended += 1
        del self.heard[seq]

    def _sizes_waiting(self, priority: int) -> tuple[Counter[str], Counter[str]]:
        """Each owner's waiting sequences, and the tokens of those that have never run. A request of `priority` counts no
        background ones unless it is one."""
        sequences, tokens = Counter[str](), Counter[str]()
        for seq in self.heard:
            restarted = seq in self.scheduler.admission.waiting._begun and self._begun & self.requests[seq]
            counts = priority == BACKGROUND or not seq.terms.is_background
            if seq.slot is None and counts and not restarted:
                sequences[seq.terms.owner] += 1
                tokens[seq.terms.owner] += seq.length if seq.num_cached is None else 0
        return sequences, tokens

    def _check_refusal(self, n: int, length: int, owner: str, priority: int, *, is_for_ever: bool) -> None:
        """Refuse only without capacity, or if other owners are known and most waiting sequences are of this owner."""
        most, most_tokens, queue = (
            self.world.max_waiting,
            self.world.max_waiting_tokens,
            self.scheduler.admission.waiting,
        )
        waiting = [seq for seq in queue if priority == BACKGROUND or not seq.terms.is_background]
        free = self.world.slots - self.scheduler.num_running
        assert len(waiting) + n > free, "a free slot is refused"
        never_fits = most is not None and n > most + self.world.slots
        if most_tokens is not None and n > self.world.slots + 1:
            never_fits = never_fits or (n - self.world.slots) * length > most_tokens
        assert is_for_ever == never_fits, "a permanent refusal is one that an idle scheduler would give"
        mine = self._sizes_waiting(BACKGROUND)[0][owner]
        is_full = most is not None and len(waiting) + n > most + free
        if most_tokens is not None:
            has_run = {*queue._begun, *(seq for seq in queue if seq.num_cached is not None)}
            behind = [*(0 if seq in has_run else seq.length for seq in waiting), *[length] * n][free:]
            is_full = is_full or (len(behind) > 1 and sum(behind) > most_tokens)
        others = {one for line in queue._classes.values() for one in line.counters} - {owner}
        assert never_fits or is_full or (owner and mine and others), "refused although there is capacity"
        # Preempted sequences may wait beyond the limit.
        if never_fits or mine or n > 1 or most is None or most_tokens is not None or len(waiting) > most + free:
            return
        # A newcomer gets a place, unless all that the largest owner has waiting have begun.
        unbegun = {one.terms.owner for one in {*waiting} - {*queue._begun} if not self._begun & self.requests[one]}
        sizes = Counter(one.terms.owner for one in waiting if one.terms.owner and one not in queue._begun)
        largest = [one for one, num in sizes.items() if num == max(sizes.values())]
        assert max(sizes.values(), default=0) < 2 or not unbegun.issuperset(largest), "a newcomer has no place"

    def _check_turn(self, queue: WaitingQueue, seq: Sequence) -> None:
        """Restarted sequences come first; then the lowest priority number, the owner that runs fewest, of these the one with
        the lowest counter, its oldest sequence."""
        if queue._begun:
            assert seq is next(iter(queue._begun))
            return
        waiting = [heard for heard in self.heard.values() if heard.seq.slot is None and not heard.seq.finished]
        best = min(heard.seq.terms.priority for heard in waiting)
        mine = [heard for heard in waiting if heard.seq.terms.priority == best]
        assert seq.terms.priority == best, "a sequence of a lower priority number waits"
        counters = queue._classes[best].counters
        running = Counter(one.terms.owner for one in self.scheduler._running)

        def served(owner: str) -> tuple[int, float]:
            return running[owner], counters[owner]

        assert served(seq.terms.owner) == min(served(heard.seq.terms.owner) for heard in mine), (
            "an owner that is served less waits"
        )

        def turn(heard: Heard) -> int:
            """A sequence that has run comes before those that have not."""
            return heard.number if heard.seq.num_cached is None else 0

        least = min(turn(heard) for heard in mine if heard.seq.terms.owner == seq.terms.owner)
        assert turn(self.heard[seq]) == least, "an older sequence of the same owner waits"

    def _is_due_a_place(self) -> bool:
        """Whether one owner uses both places, and a sequence of another one, whose turn it is, has to get one."""
        by_adapter: dict[str, list[Sequence]] = {}
        for seq in self.scheduler._running:
            if seq.terms.adapter:
                by_adapter.setdefault(seq.terms.adapter, []).append(seq)
        owners = {seq.terms.owner for group in by_adapter.values() for seq in group}
        if len(by_adapter) < 2 or len(owners) > 1 or self.scheduler.quarantine._quarantined:
            return False
        least = min(seq.terms.priority for seq in list(by_adapter.values())[-1])  # of those that make way
        queue = self.scheduler.admission.waiting
        turns = queue.in_turn(Counter(seq.terms.owner for seq in self.scheduler._running), 1) if queue else ()
        return any(
            seq.terms.adapter
            and seq.terms.adapter not in by_adapter
            and {seq.terms.owner} != owners
            and seq.terms.priority <= least
            for seq in turns
            if not seq.inflight
        )

    def _check_prompts(self, batch: StepInput, prompts: dict[Sequence, int]) -> None:
        """The oldest prompt has a third of the prompt tokens of each step, or its end. Until then only prompts of a lower
        priority number, or of half its length, have the rest. prompts: tokens that were left to compute, oldest first."""
        by_slot = {seq.slot: seq for seq in self.scheduler._running}
        admitted = {init.slot for init in batch.admit}
        rows = {by_slot[row.slot]: row for row in batch.rows if row.slot in admitted or by_slot[row.slot] in prompts}
        oldest = next((seq for seq in prompts if seq.slot is not None and seq.slot not in admitted), None)
        if oldest is None or not rows:
            return
        assert oldest in rows, "younger prompts are computed, and the oldest is not"
        own = rows.pop(oldest)
        assert own.length == prompts[oldest] or 3 * own.length >= own.length + sum(row.length for row in rows.values())
        for seq, row in rows.items() if own.length < prompts[oldest] else ():
            is_shorter = seq.terms.priority == oldest.terms.priority and 2 * (seq.length - row.start) <= prompts[oldest]
            assert seq.terms.priority < oldest.terms.priority or is_shorter, (
                "a prompt overtakes one that is not much longer"
            )

    def check(self) -> None:
        """The rules that hold after every operation."""
        scheduler = self.scheduler
        pool, live = scheduler.pool, list(scheduler.live())
        assert len(set(live)) == len(live), "a sequence is live twice"
        assert {seq for seq in live if seq is not scheduler.quarantine.canary} == set(self.heard), "a sequence is lost"
        holders = Counter(block for seq in live for block in seq.held_blocks)
        counts = [holders[block] for block in range(pool.num_blocks)]
        assert counts == pool._num_holders, "a block's holders are miscounted"
        assert set(pool._free) == {block for block in range(pool.num_blocks) if not holders[block]}, "a block leaked"
        slots = [*scheduler.admission.free_slots, *(seq.slot for seq in scheduler._running if seq.slot is not None)]
        assert sorted(slots) == list(range(self.world.slots)), "a slot leaked or has two owners"
        for seq in live:
            held = seq.held_blocks
            assert not seq.finished and len(set(held)) == len(held)
            assert len(held) <= scheduler.window.num_held(MAX_LENGTH), "a sequence holds blocks behind its window"
            assert (seq.slot is not None) or (not seq.blocks and not seq.scheduled)
            assert seq.inflight >= 0
            assert seq.scheduled <= seq.length + seq.inflight or (seq.is_deferred and seq.inflight)
            # A deferred sequence writes what a shared block has at its last position.
            written = seq.blocks[(seq.scheduled + seq.is_deferred) // BLOCK_SIZE :]
            assert all(holders[block] == 1 for block in written), "a block is written while it is shared"
        self._check_keys(pool)
        self._check_queue(scheduler.admission.waiting, live)
        quarantine = scheduler.quarantine
        assert quarantine._quarantined <= set(quarantine._records) <= set(live), "the quarantine keeps an ended request"
        assert len(quarantine._quarantined.intersection(scheduler._running)) <= 1, (
            "two quarantined requests run together"
        )

    def _check_keys(self, pool: BlockPool) -> None:
        named = {key: block for block, key in enumerate(pool.prefixes._hash_of) if key is not None}
        assert named == pool.prefixes._block_of, "prefix hashes and blocks disagree"

    def _check_queue(self, queue: WaitingQueue, live: list[Sequence]) -> None:
        counted: dict[Sequence, int] = {}
        held = Counter[str]()
        for line in queue._classes.values():
            for owner, waiting in line.by_owner.items():
                assert waiting and line.counters[owner] >= line.floor
                counted.update(waiting)
                held[owner] += len(waiting)
        assert {*counted, *queue._begun} == {seq for seq in live if seq.slot is None}
        assert len(queue) == len(counted) + len(queue._begun), "the waiting sequences are miscounted"
        assert held == {owner: num_sequences for owner, (num_sequences, _) in queue._waiting_of.items()}
        assert queue.num_tokens == sum(num_tokens for _, num_tokens in queue._waiting_of.values())
        assert queue.num_tokens == sum(counted.values()), "the waiting tokens are miscounted"
        equal: dict[tuple[object, ...], list[int]] = {}
        for seq in queue:
            if not seq.terms.is_background:
                prompt = seq.terms.cache_scope, seq.terms.adapter, *seq.prompt
                equal.setdefault(prompt, []).append(seq.num_expected)
        expected = sum(max(each) + len(each) - 1 for each in equal.values())
        assert queue.num_expected == expected, "the expected tokens are miscounted"
        assert all(num == (seq.length if seq.num_cached is None else 0) for seq, num in counted.items())
