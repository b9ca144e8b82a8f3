"""Decides which sequences run next. Knows nothing of tensors, Ray or HTTP.

A step is made in three moves. Growth: a decode that crosses into a new block gets one; when none is free, the sequence
admitted last is preempted: its blocks are freed and it waits, first in line, to be computed again from its tokens.
Admission: whoever waits longest gets a slot and blocks for all its known tokens. Selection: one row for each sequence
under a token budget, those with one token to go (decodes) first, then prompts in chunks of what is left.

Steps may be pipelined. `schedule` counts a step's tokens as computed and its samples as in flight; `commit` takes the
outputs in the order of the steps. Ranks run steps in order, so what a sequence frees may be given to the next step at
once. The row that an ended sequence still has in a later step is wasted, never wrong: `commit` passes over it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from llama_core.batch import Grow, Row, SlotInit, StepInput, StepOutput
from llama_core.blocks import BlockPool
from llama_core.errors import NonFiniteLogits, QueueFull
from llama_core.request import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_batch_size: slots. max_step_tokens: tokens of one step. max_waiting: sequences that may wait, None for any number."""

    max_batch_size: int
    max_step_tokens: int
    eos_id: int
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        assert 0 < self.max_batch_size <= self.max_step_tokens, "every running sequence must find room in a step"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did for a sequence: `token` is the one it drew, None if it ended without one (end-of-sequence, an error)."""

    sequence: Sequence
    token: int | None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step whose output is still to come: the sequences of all its rows, and of those that sample."""

    step: int
    sequences: list[Sequence]
    sampling: list[Sequence]


class Scheduler:
    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.epoch = 0
        self.num_preemptions = 0
        self._step = 0
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._running: OrderedDict[Sequence, None] = OrderedDict()  # in the order of admission
        self._free_slots = list(range(config.max_batch_size - 1, -1, -1))
        self._flights: deque[_Flight] = deque()

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
        """Every sequence that has not ended, in the order in which they will be served."""
        yield from self._running
        yield from self._waiting

    # Requests come and go.

    def check_room(self, num_sequences: int = 1) -> None:
        """Raise QueueFull unless so many more may wait. Those that find a slot free do not count as waiting."""
        limit = self.config.max_waiting
        if limit is not None and len(self._waiting) + num_sequences > limit + len(self._free_slots):
            raise QueueFull(f"{len(self._waiting)} sequences wait already, the limit is {limit}")

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. One that may not grow and has nothing to report ends here."""
        assert self.pool.blocks_for(seq.max_length) <= self.pool.num_blocks, "the cache cannot hold this sequence alone"
        assert not seq.finished and seq.scheduled == 0
        if seq.length >= seq.max_length and not seq.wants_prompt_logprobs:
            seq.finish_reason = FinishReason.LENGTH
            return
        self._waiting[seq] = None

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence wherever it is; its blocks are free when this returns. Once ended, it stays so."""
        if seq.finished:
            return
        seq.finish_reason = reason
        if seq in self._running:
            self._vacate(seq)
        else:
            del self._waiting[seq]

    def restart(self, epoch: int) -> None:
        """The ranks are new and remember nothing: every live sequence starts over from its tokens, in its old order.

        Steps in flight are forgotten; their outputs will never come.
        """
        self.epoch = epoch
        self._flights.clear()
        while self._running:
            self._requeue(next(reversed(self._running)))
        for seq in self._waiting:
            seq.inflight = 0

    # One step.

    def schedule(self) -> StepInput | None:
        """The next step, or None when nothing can run before an output comes back, or nothing is left to run."""
        grow = self._grow_decodes()
        admitted = self._admit()
        rows, sequences = self._select()
        if not rows:
            assert not admitted and not grow
            return None
        self._step += 1
        sampling = [seq for seq, row in zip(sequences, rows, strict=True) if row.samples]
        self._flights.append(_Flight(self._step, sequences, sampling))
        return StepInput(self.epoch, self._step, rows, admit=[_slot_init(seq) for seq in admitted], grow=grow)

    def commit(self, output: StepOutput) -> list[Progress]:
        """Take back the oldest step in flight: append its tokens, end what has ended."""
        flight = self._flights.popleft()
        assert (output.epoch, output.step) == (self.epoch, flight.step), "outputs come in the order of the steps"
        assert len(output.tokens) == len(flight.sampling)
        progress: list[Progress] = []
        for row, start, values in output.prompt_logprobs:
            seq = flight.sequences[row]
            assert start <= len(seq.prompt_logprobs), "a position was left out"
            # Another admission may have reported some of these positions already.
            seq.prompt_logprobs += values[max(0, len(seq.prompt_logprobs) - start) :]
            if not seq.finished and seq.prompt_len == seq.max_length and not seq.wants_prompt_logprobs:
                self.finish(seq, FinishReason.LENGTH)
                progress.append(Progress(seq, None))
        non_finite = set(output.non_finite)
        for i, seq in enumerate(flight.sampling):
            if seq.finished:
                continue
            seq.inflight -= 1
            token: int | None = output.tokens[i]
            if i in non_finite:
                token = None
                seq.error = NonFiniteLogits("the model computed a value that is not finite for this request")
                self.finish(seq, FinishReason.ERROR)
            elif token == self.config.eos_id and not seq.params.ignore_eos:
                token = None
                self.finish(seq, FinishReason.STOP)
            else:
                assert token is not None
                seq.tokens.append(token)
                if output.logprobs and (logprob := output.logprobs[i]) is not None:
                    seq.logprobs.append(logprob)
                if seq.length >= seq.max_length:
                    self.finish(seq, FinishReason.LENGTH)
            progress.append(Progress(seq, token))
        return progress

    # The three moves.

    def _grow_decodes(self) -> list[Grow]:
        grow: list[Grow] = []
        # Oldest first: a preempted one is never older than the one that needs its blocks.
        for seq in list(self._running):
            if seq not in self._running or not _runnable(seq) or _pending(seq) != 1:
                continue
            needed = self.pool.blocks_for(seq.scheduled + 1) - len(seq.blocks)
            if needed <= 0:
                continue
            while (blocks := self.pool.try_allocate(needed)) is None:
                youngest = next(reversed(self._running))
                self._requeue(youngest)
                self.num_preemptions += 1
                if youngest is seq:
                    break
            if blocks is not None:
                assert seq.slot is not None
                seq.blocks += blocks
                grow += [Grow(seq.slot, block) for block in blocks]
        return grow

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        while self._waiting and self._free_slots:
            seq = next(iter(self._waiting))
            if seq.inflight:  # preempted in mid-step: its next token is still on its way back
                break
            # One block in reserve for each that runs, or the newcomer would be the first to be preempted again.
            needed = self.pool.blocks_for(seq.length)
            if needed + len(self._running) > self.pool.num_free and self._running:
                break
            blocks = self.pool.try_allocate(needed)
            if blocks is None:
                break
            del self._waiting[seq]
            seq.blocks = blocks
            seq.slot = self._free_slots.pop()
            self._running[seq] = None
            admitted.append(seq)
        return admitted

    def _select(self) -> tuple[list[Row], list[Sequence]]:
        runnable = [seq for seq in self._running if _runnable(seq)]
        decodes = [seq for seq in runnable if _pending(seq) == 1]
        prefills = [seq for seq in runnable if _pending(seq) > 1]
        rows: list[Row] = []
        sequences: list[Sequence] = []
        budget = self.config.max_step_tokens
        for seq in decodes + prefills:
            if budget == 0:
                break
            count = min(_pending(seq), budget)
            end = seq.scheduled + count
            samples = end == seq.length + seq.inflight and end < seq.max_length
            assert seq.slot is not None and end <= len(seq.blocks) * self.pool.block_size
            rows.append(Row(seq.slot, seq.scheduled, count, samples))
            sequences.append(seq)
            seq.scheduled = end
            seq.inflight += samples
            budget -= count
        return rows, sequences

    def _requeue(self, seq: Sequence) -> None:
        """Running -> first in line. Its tokens stay; what was computed from them does not."""
        self._vacate(seq)
        seq.scheduled = 0
        self._waiting[seq] = None
        self._waiting.move_to_end(seq, last=False)

    def _vacate(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self.pool.release(seq.blocks)
        self._free_slots.append(seq.slot)
        seq.blocks = []
        seq.slot = None
        del self._running[seq]


def _pending(seq: Sequence) -> int:
    """Tokens known to the ranks, or about to be, that no step has been given yet."""
    return seq.length + seq.inflight - seq.scheduled


def _runnable(seq: Sequence) -> bool:
    """Whether another row makes sense: there is room for another token, or prompt logprobs are still to be computed."""
    if seq.length + seq.inflight < seq.max_length:
        return True
    return seq.wants_prompt_logprobs and seq.scheduled < seq.prompt_len


def _slot_init(seq: Sequence) -> SlotInit:
    assert seq.slot is not None
    params = seq.params
    return SlotInit(
        slot=seq.slot,
        tokens=list(seq.tokens),
        blocks=list(seq.blocks),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        top_logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=seq.wants_prompt_logprobs,
    )
