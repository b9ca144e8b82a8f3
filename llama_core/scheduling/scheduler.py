"""Decides which sequences run next. Knows nothing of tensors, Ray or HTTP.

A step is made in three moves under one budget of tokens. Decodes, oldest first: a row for each running sequence that has
one token to go. One that crosses into a new block gets it; when none is free, the sequence admitted last is preempted: it
gives its blocks back and waits, first in line, to be computed again from its tokens. Prefills: prompts in chunks of what
is left, and of fewer tokens where they would make the decodes beside them stutter. Admission: whoever waits longest gets a
slot, blocks for all its known tokens and its first row, as long as there is budget, so that its beginning is looked for in
the cache when it is needed, not before.

Steps may be pipelined. `schedule` counts a step's tokens as computed and its samples as in flight; `commit` takes the
outputs in the order of the steps. Ranks run steps in order, so what a sequence frees may be given to the next step at
once, and a block may be shared from the moment when the step that fills it is made. The row that an ended sequence still
has in a later step is wasted, never wrong: `commit` passes over it.

A sequence whose tokens repeat themselves (`drafting.py`) waits for its output, and its next row carries drafts. `commit`
keeps the draws up to the first that differs from its draft; each was made from the same tokens as it would have been alone.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llama_core.errors import InvalidParameter, NonFiniteLogits, QueueFull, RankFailure
from llama_core.scheduling.block_pool import BlockId, BlockKey, BlockPool, block_key, root_key
from llama_core.scheduling.fair_queue import OUTPUT_COST, PROMPT_COST, WaitingQueue
from llama_core.scheduling.prompt_lookup import MAX_DRAFTS_A_ROW, PromptLookup
from llama_core.scheduling.quarantine import Quarantine
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.step import Draft, Grow, Row, SlotInit, StepInput, StepOutput

# Tokens of prompts beside decodes: on CPUs they take about as long as the decodes' own step, which each of these lengthens.
TOKENS_BESIDE: Final = 64
TOKENS_BESIDE_EACH: Final = 2
# And of a step that nobody waits through for a next token.
TOKENS_ALONE: Final = 512
# What each of many prompts may bring.
TOKENS_A_PROMPT: Final = 128


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_batch_size: slots. max_step_tokens: tokens of one step. max_waiting and max_waiting_tokens: sequences that
    may wait and their tokens, None for any number. max_drafts: proposed tokens of one step, 0 for no speculation."""

    max_batch_size: int
    max_step_tokens: int
    stop_ids: frozenset[int]
    max_waiting: int | None = None
    max_drafts: int = 0
    prefix_caching: bool = True
    max_waiting_tokens: int | None = None

    def __post_init__(self) -> None:
        assert 0 < self.max_batch_size <= self.max_step_tokens, "every running sequence must find room in a step"


class Progress(NamedTuple):
    """What a step did for a sequence: the tokens it drew, none if it ended without one (end-of-sequence, an error)."""

    sequence: Sequence
    tokens: list[int]


@dataclass(slots=True)
class _Flight:
    """A step whose output is still to come, and the sequence of each of its rows."""

    batch: StepInput
    sequences: list[Sequence] = field(default_factory=list)

    def add(self, seq: Sequence, row: Row) -> None:
        """Count the row's tokens as computed, without its drafts, and its draw as in flight."""
        self.batch.rows.append(row)
        self.sequences.append(seq)
        seq.scheduled = row.start + row.length - row.num_drafts
        seq.num_drafts = row.num_drafts
        seq.inflight += row.samples


class Scheduler:
    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.epoch = 0
        self.max_prompt_tokens = config.max_step_tokens  # of one step
        self.num_preemptions = 0
        self.num_prefix_hits = 0  # tokens that were found in the cache instead of computed
        self.num_drafts = 0  # proposed tokens that came back checked
        self.num_drafts_accepted = 0
        self._step = 0
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # in the order of admission
        self._free_slots = list(range(config.max_batch_size - 1, -1, -1))
        self._flights: deque[_Flight] = deque()
        self._head_lacks_blocks = False  # the first in line was refused, and nothing has been given back since
        self.quarantine = Quarantine()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Steps whose output has not been committed."""
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._flights)

    def live(self) -> Iterator[Sequence]:
        """Every sequence that has not ended: those that run, then those that wait."""
        yield from self._running
        yield from self._waiting

    # Requests come and go.

    def check_capacity(self, lengths: Seq[int] = (1,), owner: str = "") -> None:
        """Raise unless a request whose sequences have so many tokens each may be queued as a whole: QueueFull if the capacity
        is taken now, InvalidParameter if no idle server could ever take it.

        A sequence that finds a free slot does not wait; a sequence that waits alone may be of any length.
        """
        waiting, num_free = self._waiting, len(self._free_slots)
        if len(waiting) + len(lengths) <= num_free:
            return
        self._check_fits_idle(lengths)
        most, most_tokens = self.config.max_waiting, self.config.max_waiting_tokens
        capacity = None if most is None else most + num_free - len(waiting)
        if capacity is not None and len(lengths) > capacity:
            num_waiting = max(0, len(waiting) - num_free)
            raise QueueFull(f"{num_waiting} sequences wait already, the limit is {most}")
        capacity_tokens = None
        if most_tokens is not None:
            queued_tokens = waiting.tokens_behind(num_free)
            capacity_tokens = most_tokens - queued_tokens
            queued_here = lengths[max(0, num_free - len(waiting)) :]
            if (queued_tokens or len(queued_here) > 1) and sum(queued_here) > capacity_tokens:
                raise QueueFull(f"sequences of {queued_tokens} tokens wait already, the limit is {most_tokens}")
        if not waiting.has_capacity(owner, capacity, capacity_tokens):
            raise QueueFull("most waiting requests are of this key or user; the remaining capacity is for others")

    def _check_fits_idle(self, lengths: Seq[int]) -> None:
        config = self.config
        slots, most, most_tokens = config.max_batch_size, config.max_waiting, config.max_waiting_tokens
        if most is not None and len(lengths) > slots + most:
            raise InvalidParameter(
                f"n: the request has {len(lengths)} choices (prompts * n); at most {slots + most} can be taken at once: "
                f"{slots} that run (max_batch_size) and {most} that wait (max_queue)",
                param="n",
            )
        num_tokens = sum(lengths[slots:])
        if most_tokens is not None and len(lengths) > slots + 1 and num_tokens > most_tokens:
            raise InvalidParameter(
                f"prompt: {len(lengths) - slots} choices of {num_tokens} prompt tokens would wait behind the {slots} that run; "
                f"at most {most_tokens} tokens can wait (max_queue_tokens)",
                param="prompt",
            )

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. One that may not grow and has nothing to report ends here."""
        assert self.pool.blocks_for(seq.max_length) <= self.pool.num_blocks, "the cache cannot hold this sequence alone"
        assert not seq.finished and seq.scheduled == 0
        if seq.length >= seq.max_length and not seq.wants_prompt_logprobs:
            seq.finish_reason = FinishReason.LENGTH
            return
        self._waiting.add(seq)
        self._head_lacks_blocks = False  # it may be another one now

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence wherever it is; its blocks are free when this returns. Once ended, it stays so."""
        if seq.finished:
            return
        seq.finish_reason = reason
        self.quarantine.ended(seq)
        if seq.slot is not None:
            self._vacate(seq)
            self._running.remove(seq)
        else:
            self._waiting.remove(seq)
            self._head_lacks_blocks = False

    def restart(self, epoch: int, failure: RankFailure | None = None) -> Sequence | None:
        """Start every live sequence over from its tokens, in its old order: the ranks are new and have none of them.

        Steps in flight are dropped; their outputs will never come. failure: of the old ranks, None where they were replaced
        without one. Returns the request that the failure proves harmful (`quarantine.py`); it has ended then.
        """
        self.epoch = epoch
        if self.quarantine.canary is not None:
            self.finish(self.quarantine.canary, FinishReason.ABORT)
        in_flight = list(dict.fromkeys(seq for step in self._flights for seq in step.sequences if not seq.finished))
        if failure is not None:
            self.quarantine.ranks_failed(in_flight)
        self._flights.clear()
        while self._running:
            self._requeue_youngest()
        for seq in self._waiting:
            seq.inflight = seq.num_drafts = 0
        self.quarantine.ranks_replaced(self._waiting)
        self.pool.forget()
        harmful = self.quarantine.verdict(in_flight, failure) if failure is not None else None
        if harmful is not None:
            self.finish(harmful, FinishReason.ERROR)
        if (canary := self.quarantine.new_canary(self._waiting, min(self.config.stop_ids, default=0))) is not None:
            self._waiting.add_first(canary)
        self._head_lacks_blocks = False
        return harmful

    def use_pool(self, pool: BlockPool) -> None:
        """Other ranks may have room for fewer blocks, or more. Between `restart` and the next step: nobody has any."""
        assert not self._running and not self._flights
        self.pool = pool
        self._head_lacks_blocks = False

    def limit_prompt_tokens(self, num_tokens: int) -> None:
        """Put at most this many tokens of prompts into one step."""
        self.max_prompt_tokens = num_tokens

    def forget_unsent(self) -> None:
        """The step made last has reached no rank. For `restart` to follow: what it counted as computed was not."""
        self._flights.pop()

    # One step.

    def schedule(self) -> StepInput | None:
        """The next step, or None when nothing can run before an output comes back, or nothing is left to run."""
        flight = _Flight(StepInput(self.epoch, self._step + 1, rows=[]))
        prefills, budget = self._add_decodes(flight)
        budget = min(budget, self._room_for_prompts(len(flight.sequences), len(prefills)))
        for seq in prefills:
            budget -= self._add_prefill(seq, flight, budget)
        self._admit(flight, budget)
        if not flight.sequences:
            assert not flight.batch.grow, "nothing runs, yet somebody got a block"
            return None
        self._step += 1
        self._flights.append(flight)
        return flight.batch

    def commit(self, output: StepOutput) -> list[Progress]:
        """Take back the oldest step in flight: append its tokens, end what has ended."""
        flight = self._flights.popleft()
        batch = flight.batch
        assert (output.epoch, output.step) == (self.epoch, batch.step), "outputs come in the order of the steps"
        progress: list[Progress] = []
        for index, start, values in output.prompt_logprobs:
            seq = flight.sequences[index]
            assert start <= len(seq.prompt_logprobs), "a position was left out"
            # Another admission may have reported some of these positions already.
            seq.prompt_logprobs += values[max(0, len(seq.prompt_logprobs) - start) :]
            if not seq.finished and seq.prompt_len == seq.max_length and not seq.wants_prompt_logprobs:
                self.finish(seq, FinishReason.LENGTH)
                progress.append(Progress(seq, []))
        learns = self._max_drafts_a_row() > 0
        drafts = iter(batch.drafts)
        begin = 0  # of the row's draws
        for row, seq in zip(batch.rows, flight.sequences, strict=True):
            if not row.samples:
                continue
            end = begin + 1 + row.num_drafts
            proposed = next(drafts).tokens if row.num_drafts else None
            if seq.finish_reason is None:
                num_right = 0
                if learns or proposed:
                    num_right = self._compare(seq, proposed, output.tokens[begin:end])
                progress.append(Progress(seq, self._take(seq, output, begin, num_right)))
            begin = end
        assert begin == len(output.tokens)
        return progress

    def _compare(self, seq: Sequence, proposed: list[int] | None, draws: list[int]) -> int:
        """How many proposed tokens were drawn. Where none were, learn from what could have been."""
        lookup = seq.lookup = seq.lookup or PromptLookup()
        guess = proposed or lookup.guess(seq.tokens, 1)
        num_right = 0
        while num_right < len(guess) and guess[num_right] == draws[num_right]:
            num_right += 1
        lookup.observe(num_right, num_right < len(guess))
        if proposed is None:
            return 0
        self.num_drafts += len(proposed)
        self.num_drafts_accepted += num_right
        return num_right

    def _take(self, seq: Sequence, output: StepOutput, begin: int, num_right: int) -> list[int]:
        """Append a row's draws, of which the first is output.tokens[begin]: as many as had a right draft, and the one after
        them, unless one of them ends the sequence. Returns what was appended."""
        taken: list[int] = []
        reason: FinishReason | None = None
        for i in range(begin, begin + num_right + 1):
            token = output.tokens[i]
            if output.non_finite and i in output.non_finite:
                seq.error = NonFiniteLogits("the model computed a value that is not finite for this request")
                reason = FinishReason.ERROR
                break
            if token in self.config.stop_ids and not seq.params.ignore_eos:
                reason = FinishReason.STOP
                break
            taken.append(token)
            if output.logprobs and (logprob := output.logprobs[i]) is not None:
                seq.logprobs.append(logprob)
        seq.tokens += taken
        self._waiting.count_served(seq, OUTPUT_COST * len(taken))
        if taken and not seq.is_trusted:
            self.quarantine.tokens_sampled(seq)
        seq.inflight -= 1
        seq.num_drafts = 0
        if seq.slot is not None:  # else it was preempted meanwhile, and nothing computed for it counts
            seq.scheduled += num_right
        if reason is None and len(seq.tokens) >= seq.max_length:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.finish(seq, reason)
        return taken

    # The three moves.

    def _add_decodes(self, flight: _Flight) -> tuple[list[Sequence], int]:
        """Rows for all that have one token to go. Returns those that have more, and what is left of the step's tokens."""
        batch, block_size = flight.batch, self.pool.block_size
        max_drafts = self._max_drafts_a_row()
        prefills: list[Sequence] = []
        num_tokens = 0
        # Oldest first: who is preempted is never older than who needs the blocks, so it is still to come in this loop.
        for seq in self._running:
            start, length = seq.scheduled, len(seq.tokens) + seq.inflight
            if length - start != 1 or length >= seq.max_length or seq.num_drafts:
                if start < length and not seq.inflight:
                    prefills.append(seq)
                continue
            drafts: list[int] = []
            if max_drafts and seq.lookup is not None:
                drafts = self._propose(seq, seq.lookup, min(max_drafts, seq.max_length - length - 1))
                if drafts and seq.inflight:
                    continue  # it is not known yet where its next drafts begin
            if length > len(seq.blocks) * block_size and not self._grow(seq, length, batch.grow):
                continue
            if drafts and not self._grow(seq, length + len(drafts), batch.grow, preempts=False):
                del drafts[len(seq.blocks) * block_size - length :]
            assert seq.slot is not None
            if drafts:
                batch.drafts.append(Draft(seq.slot, length, drafts))
            flight.add(seq, Row(seq.slot, start, 1 + len(drafts), True, len(drafts)))
            num_tokens += 1 + len(drafts)
        return prefills, self.config.max_step_tokens - num_tokens

    def _room_for_prompts(self, num_decodes: int, num_prefills: int) -> int:
        """Tokens of prompts beside so many decodes, each of which they delay by the time that they take themselves.

        A prompt that comes alone is read in pieces that are hardly felt. When many come at once, a third of all or more wait
        for their first token, and few long pauses cost them and the others less than many short ones: every prompt may
        bring a piece.
        """
        room = TOKENS_BESIDE + TOKENS_BESIDE_EACH * num_decodes if num_decodes else TOKENS_ALONE
        num_prompts = num_prefills + min(len(self._waiting), len(self._free_slots))
        if 2 * num_prompts >= num_decodes:
            room = max(room, TOKENS_A_PROMPT * num_prompts)
        return min(room, self.max_prompt_tokens)

    def _add_prefill(self, seq: Sequence, flight: _Flight, budget: int) -> int:
        """A row for as many of the sequence's known tokens as the budget allows. Returns how many."""
        end = min(seq.length, seq.scheduled + budget)
        count = end - seq.scheduled
        if count:
            assert seq.slot is not None and end <= len(seq.blocks) * self.pool.block_size
            flight.add(seq, Row(seq.slot, seq.scheduled, count, end == seq.length < seq.max_length))
            self._name_blocks(seq)
        return count

    def _admit(self, flight: _Flight, budget: int) -> None:
        """Slots, blocks and first rows for those who wait longest."""
        while budget and self._waiting and self._free_slots and not self._head_lacks_blocks:
            seq = self._waiting.first()
            if seq.inflight:  # preempted in mid-step: its next token is still on its way back
                return
            if not self.quarantine.admits(seq, self._running):
                return
            found = self._find_prefix(seq)
            needed = self.pool.blocks_for(seq.length) - len(found)
            # One block in reserve for each that runs, or the newcomer would be the first to be preempted again.
            blocks = self.pool.try_allocate(needed, shared=found, reserve=len(self._running))
            if blocks is None:
                self._head_lacks_blocks = True
                return
            self._waiting.remove(seq)
            if seq.num_cached is None:  # else it ran before, and was charged then
                self._waiting.count_served(seq, PROMPT_COST * (seq.length - len(found) * self.pool.block_size))
            seq.slot = self._free_slots.pop()
            seq.blocks = found + blocks
            seq.num_named = len(found)
            seq.scheduled = len(found) * self.pool.block_size
            if seq.num_cached is None:
                seq.num_cached = seq.scheduled
            self.num_prefix_hits += seq.scheduled
            self._running.append(seq)
            flight.batch.admit.append(_slot_init(seq))
            budget -= self._add_prefill(seq, flight, budget)

    # Blocks.

    def _grow(self, seq: Sequence, end: int, grow: list[Grow], *, preempts: bool = True) -> bool:
        """Blocks for positions 0 .. end, if need be those of the sequences admitted last. False if there are none to be had:
        none are free, or it was the last itself."""
        assert seq.slot is not None
        slot, needed = seq.slot, self.pool.blocks_for(end) - len(seq.blocks)
        if needed <= 0:
            return True
        self._name_blocks(seq)
        while (blocks := self.pool.try_allocate(needed)) is None:
            if not preempts:
                return False
            youngest = self._running[-1]
            self._requeue_youngest()
            self.num_preemptions += 1
            if youngest is seq:
                return False
        seq.blocks += blocks
        grow += [Grow(slot, block) for block in blocks]
        return True

    def _requeue_youngest(self) -> None:
        """Running -> first in line. Its tokens stay, and its full blocks may still be found when it comes back."""
        seq = self._running.pop()
        self._vacate(seq)
        seq.scheduled = 0
        self._waiting.add_first(seq)

    def _vacate(self, seq: Sequence) -> None:
        assert seq.slot is not None
        if seq.finish_reason is FinishReason.ERROR:
            self.pool.forget(seq.blocks)  # what was computed for it is not to be trusted
        else:
            self._name_blocks(seq)
        self.pool.release(seq.blocks)
        self._free_slots.append(seq.slot)
        seq.blocks = []
        seq.num_named = 0
        seq.slot = None
        self._head_lacks_blocks = False

    def _find_prefix(self, seq: Sequence) -> list[BlockId]:
        """Blocks that have the sequence's beginning. At least one of its tokens is left: only computing draws the next."""
        # Logprobs of a prompt come from computing it.
        if not self.config.prefix_caching or seq.wants_prompt_logprobs:
            return []
        return self.pool.find(self._keys(seq, 0, (seq.length - 1) // self.pool.block_size))

    def _name_blocks(self, seq: Sequence) -> None:
        """Let the sequence's full blocks be found: those of which every token is known, and computed by a step that is made.
        Drafts are neither."""
        num_full = min(seq.scheduled, seq.length) // self.pool.block_size
        if self.config.prefix_caching and num_full > seq.num_named:
            for i, key in enumerate(self._keys(seq, seq.num_named, num_full), seq.num_named):
                self.pool.name(seq.blocks[i], key)
            seq.num_named = num_full

    def _keys(self, seq: Sequence, begin: int, end: int) -> Iterator[BlockKey]:
        """Keys of the sequence's blocks begin .. end, made when they are asked for and kept."""
        keys, size = seq.block_keys, self.pool.block_size
        for i in range(begin, end):
            if i == len(keys):
                keys.append(
                    block_key(keys[-1] if keys else root_key(seq.cache_scope), seq.tokens[i * size : (i + 1) * size])
                )
            yield keys[i]

    # Drafts.

    def _max_drafts_a_row(self) -> int:
        """The running sequences share the drafts of a step; 0 when there would be less than 2 for each."""
        num_running = len(self._running)
        if not num_running:
            return 0
        num_drafts = min(self.config.max_drafts, self.config.max_step_tokens - num_running) // num_running
        return min(num_drafts, MAX_DRAFTS_A_ROW) if num_drafts > 1 else 0

    def _propose(self, seq: Sequence, lookup: PromptLookup, limit: int) -> list[int]:
        """Tokens that may well come next; none when checking them would not pay. The end of the sequence is not among them."""
        count = lookup.num_worthwhile(limit, alone=len(self._running) == 1)
        drafts = lookup.guess(seq.tokens, count) if count else []
        if seq.params.ignore_eos or self.config.stop_ids.isdisjoint(drafts):
            return drafts
        return list(itertools.takewhile(lambda token: token not in self.config.stop_ids, drafts))


def _slot_init(seq: Sequence) -> SlotInit:
    assert seq.slot is not None
    return SlotInit(
        slot=seq.slot,
        tokens=list(seq.tokens),
        blocks=list(seq.blocks),
        params=seq.params,
        prompt_logprobs=seq.wants_prompt_logprobs,
    )
