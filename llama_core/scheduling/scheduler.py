"""Selects what the next step computes. Knows nothing of tensors, Ray or HTTP.

A step is made in three moves under one budget of tokens. Decodes, oldest first: a row for each running sequence that has one
known token to compute. A sequence that crosses into a new block gets one; when none is free, the sequence admitted last is
preempted: it releases its blocks and waits, before its owner's others, to be computed again from its tokens. Prefills:
prompts in chunks of what is left, and of fewer tokens where they would delay the decodes beside them. The oldest prompt comes
first, but a share of each step is for much shorter ones (`prompt_budget.py`). Admission (`admission.py`): the next waiting
sequence gets a slot, blocks and its first row, as long as there is budget.

Steps may be pipelined. `schedule` counts a step's tokens as computed and its samples as in flight; `commit` takes the outputs
in the order of the steps. Ranks run steps in order, so blocks that a sequence releases may be given to the next step at once,
and a block may be shared as soon as the step that fills it has been made. The row that an ended sequence still has in a later
step is wasted, never wrong: `commit` passes over it.

A sequence whose tokens repeat themselves (`speculation.py`) waits for its output, and its next row carries drafts. `commit`
keeps the samples up to the first that differs from its draft; each was sampled after the same tokens as it would have been
alone. A sequence whose grammar was too slow for a step gets no sample from it, and then the same row again (`Sequence.defer`).
"""

import math
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from llama_core.errors import NonFiniteLogits, NoTokenAllowed, QueueFull, RankFailure
from llama_core.scheduling.adapter_places import AdapterPlaces
from llama_core.scheduling.admission import Admission, are_background
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.drafting import PRICE_ALONE, DraftPrice, new_drafting
from llama_core.scheduling.fair_queue import OUTPUT_COST
from llama_core.scheduling.prompt_budget import PromptBudget, for_shorter, overtakes
from llama_core.scheduling.quarantine import Quarantine
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.sliding_window import SlidingWindow
from llama_core.scheduling.speculation import Speculation
from llama_core.scheduling.step import Draft, Grow, Row, SlotInit, StepInput, StepOutput


@dataclass(slots=True)
class _InFlightStep:
    """A step whose output has not been read back, and the sequence of each of its rows. learns: drafts were possible."""

    batch: StepInput
    sequences: list[Sequence] = field(default_factory=list)
    learns: bool = False
    num_prompt_tokens: int = 0

    def add(self, seq: Sequence, row: Row) -> None:
        """Count the row's tokens as computed, without its drafts, and its sample as in flight."""
        self.batch.rows.append(row)
        self.sequences.append(seq)
        seq.scheduled = row.start + row.length - row.num_drafts
        seq.num_drafts = row.num_drafts
        seq.inflight += row.samples


def _non_finite() -> NonFiniteLogits:
    return NonFiniteLogits("the model computed a value that is not finite for this request")


class Scheduler:
    """`add` sequences; `schedule` and `commit` steps until nothing is left."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.epoch = 0
        self.prompt_budget = PromptBudget(config.max_step_tokens)
        self.num_preemptions = 0
        self.num_deferred = 0  # samples of live sequences that a slow grammar left to a later step
        self.quarantine = Quarantine()
        self.speculation = Speculation(config.max_drafts, config.max_step_tokens, config.stop_ids)
        self.window = SlidingWindow.of(config.window, pool.block_size, config.max_step_tokens)
        self.adapter_places = AdapterPlaces(config.max_loras)
        self.admission = Admission(
            pool,
            self.quarantine,
            num_slots=config.max_batch_size,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            prefix_caching=config.prefix_caching,
            window=self.window,
            adapter_places=self.adapter_places,
        )
        self._waiting = self.admission.waiting
        self._step = 0
        self._leaves_prompt = False  # the step made last leaves tokens of a prompt to compute
        self._num_left = 0  # tokens of running sequences' prompts that it leaves
        self._running: list[Sequence] = []  # in the order of admission
        self._in_flight: deque[_InFlightStep] = deque()

    @property
    def pool(self) -> BlockPool:
        return self.admission.pool

    @property
    def num_waiting(self) -> int:
        return self._waiting.length

    @property
    def num_background_waiting(self) -> int:
        """Of `num_waiting`: they take no room from others."""
        return self._waiting.num_background

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of prompts that are to be computed, as far as they are known to be in no cache: of waiting sequences, but for
        background ones, and of running ones, the steps in flight included."""
        return self._waiting.num_expected + self._num_left + sum([step.num_prompt_tokens for step in self._in_flight])

    @property
    def num_prefix_hits(self) -> int:
        """Tokens found in the prefix cache instead of computed."""
        return self.admission.num_prefix_hits

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._in_flight or self._waiting.length)

    def live(self) -> Iterator[Sequence]:
        """Every sequence that has not ended: the running ones, then the waiting ones."""
        yield from self._running
        yield from self._waiting

    # The life of a sequence.

    def check_capacity(self, lengths: Seq[int] = (1,), owner: str = "") -> None:
        """Raises QueueFull or InvalidParameter unless sequences of so many tokens each may be queued together, once
        `make_room` has made room for them."""
        self.admission.victims(lengths, owner)

    def make_room(self, lengths: Seq[int], owner: str, *, is_background: bool = False) -> list[Sequence]:
        """`check_capacity`, and end the waiting sequences that have to give way. Returns them; none of their requests has
        begun. Background sequences leave their slots."""
        if not is_background:
            self._vacate_background()
        victims = self.admission.victims(lengths, owner, is_background=is_background)
        for seq in victims:
            seq.error = QueueFull("the queue is full: this request has given way to one of a key or user with fewer")
            self.finish(seq, FinishReason.ERROR)
        return victims

    def add(self, seq: Sequence, *, first: bool = False) -> None:
        """Queue a sequence that has not run here. One that may not grow and has nothing to report ends at once. first: before
        all others, for a sequence that another engine has begun."""
        assert self.window.num_held(seq.max_length) <= self.pool.num_blocks, "the cache cannot hold this sequence alone"
        assert not seq.finished and seq.scheduled == 0
        assert not seq.terms.adapter or seq.terms.adapter in self.adapter_places.folders, "the adapter is unknown"
        if seq.length >= seq.max_length and not (seq.wants_prompt_logprobs or seq.params.pooling):
            seq.finish_reason = FinishReason.LENGTH
            return
        if first:
            self.admission.queue_first(seq)
        else:
            self.admission.queue(seq)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state; its blocks are free when this returns. A sequence that has ended stays as it is."""
        if seq.finished:
            return
        seq.finish_reason = reason
        self.quarantine.ended(seq)
        if seq.slot is not None:
            self.admission.vacate(seq)
            self._running.remove(seq)
        else:
            self.admission.leave_queue(seq)
        if reason is FinishReason.ERROR and seq.terms.adapter and seq.num_cached is not None:
            self.adapter_places.drop(seq.terms.adapter, self._running)

    def restart(self, epoch: int, failure: RankFailure | None = None) -> Sequence | None:
        """Start every live sequence over from its tokens, in its old order: the ranks are new and have none of them.

        Steps in flight are dropped; their outputs will never come. failure: of the old ranks, None where they were replaced
        without one. Returns the request that the failure proves harmful (`quarantine.py`); it has ended then.
        """
        self.epoch = epoch
        waiting, quarantine = self._waiting, self.quarantine
        if quarantine.canary is not None:
            self.finish(quarantine.canary, FinishReason.ABORT)
        in_flight = list(dict.fromkeys(seq for step in self._in_flight for seq in step.sequences if not seq.finished))
        if failure is not None:
            quarantine.ranks_failed(in_flight)
        self._in_flight.clear()
        self._num_left = 0
        while self._running:
            self.admission.queue_first(self._vacate(self._running[-1]))
        for seq in waiting:
            seq.inflight = seq.num_drafts = 0
        quarantine.ranks_replaced(waiting)
        self.pool.prefixes.clear()
        self.adapter_places.forget()
        harmful = quarantine.verdict(in_flight, failure) if failure is not None else None
        if harmful is not None:
            self.finish(harmful, FinishReason.ERROR)
        if (canary := quarantine.new_canary(waiting, min(self.config.stop_ids, default=0))) is not None:
            self.admission.queue_first(canary)
        return harmful

    def use_pool(self, pool: BlockPool) -> None:
        """Use a pool of another size, as other ranks may have. Between `restart` and the next step: no block is held then."""
        assert not self._running and not self._in_flight
        self.admission.use_pool(pool)

    def stop(self, seq: Sequence) -> None:
        """End a sequence at a stop string. The stop string is the reason also where the same step has ended the sequence
        otherwise: by its last allowed token, or by a token after the stop string."""
        self.finish(seq, FinishReason.STOP)
        seq.finish_reason, seq.error = FinishReason.STOP, None

    def newest(self, count: int) -> list[Sequence]:
        """The running sequences that were admitted last; right after `schedule`, those that its step admits."""
        return self._running[-count:]

    @property
    def admits_newcomers(self) -> bool:
        """Whether a request that came now could be admitted to the next step: a slot is free, and none waits before it, or a
        prompt is being computed, which it could overtake."""
        if self.is_background:  # and makes room
            return True
        return bool(self.admission.free_slots) and (self._leaves_prompt or self._waiting.is_background)

    @property
    def is_background(self) -> bool:
        """Whether there are live requests, and all are background ones."""
        return are_background(self._running) and self._waiting.is_background and self.has_work

    def drop_unsent(self) -> None:
        """Forget the step made last, which has reached no rank. `restart` must follow: its tokens count as computed and are
        not."""
        self._in_flight.pop()

    # One step.

    def schedule(self) -> StepInput | None:
        """The next step, or None when nothing can run before an output comes back, or nothing is left to run."""
        if self._waiting.length:
            self._preempt_for_waiting()
        step = _InFlightStep(StepInput(self.epoch, self._step + 1, rows=[]))
        prefills, budget = self._add_decodes(step)
        num_prompts = len(prefills) + min(self._waiting.length, len(self.admission.free_slots))
        num_decodes = len(step.sequences)
        budget = min(budget, self.prompt_budget.of_step(num_decodes, num_prompts)) if num_prompts else 0
        if prefills:
            budget = self._add_shorter(prefills, step, budget)
        for seq in prefills:
            budget -= self._add_prefill(seq, step, budget)
        while budget and self._waiting.length and (admitted := self._admit(step)) is not None:
            budget -= self._add_prefill(admitted, step, budget)
        prompts = step.batch.rows[num_decodes:]
        unfinished = {*prefills, *step.sequences[num_decodes:]} if prefills or prompts else ()
        self._num_left = sum(seq.num_pending for seq in unfinished)
        self._leaves_prompt = bool(prompts) and not all(row.samples for row in prompts)
        if not step.sequences:
            assert not step.batch.grow, "nothing runs, yet a sequence got a block"
            return None
        self._step += 1
        self._in_flight.append(step)
        return step.batch

    def commit(self, output: StepOutput) -> dict[Sequence, list[int]]:
        """Take back the oldest step in flight: append its tokens, end what has ended. Returns, for each sequence that gained
        tokens or ended, the tokens that it gained: none if it ended without one (a stop token, an error)."""
        step = self._in_flight.popleft()
        batch = step.batch
        assert (output.epoch, output.step) == (self.epoch, batch.step), "outputs come in the order of the steps"
        gained: dict[Sequence, list[int]] = {}
        for index, start, values in output.prompt_logprobs:
            seq = step.sequences[index]
            assert start <= len(seq.prompt_logprobs), "a position was left out"
            # Another admission may have reported some of these positions already.
            seq.prompt_logprobs += values[max(0, len(seq.prompt_logprobs) - start) :]
            if not seq.finished and any(math.isnan(entry.logprob) for entry in values):
                seq.error = _non_finite()
                self.finish(seq, FinishReason.ERROR)
                gained[seq] = []
            if not seq.finished and seq.prompt_len == seq.max_length and not seq.wants_prompt_logprobs:
                self.finish(seq, FinishReason.LENGTH)
                gained[seq] = []
        for index, embedding in output.embeddings:
            seq = step.sequences[index]
            if not seq.finished:
                seq.embedding, seq.error = embedding, None if embedding else _non_finite()
                self.finish(seq, FinishReason.LENGTH if embedding else FinishReason.ERROR)
                gained[seq] = []
        for index, start, tokens in output.forced:
            step.sequences[index].forced = start, tokens
        drafts = iter(batch.drafts)
        begin = 0  # of the row's samples
        for row, seq in zip(batch.rows, step.sequences, strict=True):
            if not row.samples:
                continue
            end = begin + 1 + row.num_drafts
            proposed = next(drafts).tokens if row.num_drafts else None
            if seq.finish_reason is None:
                if begin in output.deferred:
                    self.num_deferred += end - begin
                    seq.defer()
                else:
                    num_accepted = 0
                    if step.learns or proposed:
                        drafting = seq.drafting = seq.drafting or new_drafting()
                        num_accepted = self.speculation.verify(drafting, seq.tokens, proposed, output.tokens[begin:end])
                    gained[seq] = self._append(seq, output, begin, num_accepted)
            begin = end
        assert begin == len(output.tokens)
        return gained

    def _append(self, seq: Sequence, output: StepOutput, begin: int, num_accepted: int) -> list[int]:
        """Append a row's samples, of which the first is output.tokens[begin]: those whose drafts were accepted and the one
        after them, unless one of them ends the sequence. Returns what was appended."""
        appended: list[int] = []
        reason: FinishReason | None = None
        for i in range(begin, begin + num_accepted + 1):
            token = output.tokens[i]
            if output.non_finite and i in output.non_finite:
                seq.error = _non_finite()
                reason = FinishReason.ERROR
                break
            if output.refused and (words := dict(output.refused).get(i)) is not None:
                seq.error = NoTokenAllowed(words)
                reason = FinishReason.ERROR
                break
            if (token in self.config.stop_ids and not seq.params.ignore_eos) or token in seq.params.stop_token_ids:
                reason = FinishReason.STOP
                if token in seq.params.stop_token_ids:
                    seq.stop_token = token
                if not seq.params.include_stop_str_in_output:
                    break
            appended.append(token)
            if output.logprobs and (logprob := output.logprobs[i]) is not None:
                seq.logprobs.append(logprob)
            if reason is not None:
                break
        seq.tokens += appended
        self._waiting.count_served(seq, OUTPUT_COST * len(appended))
        if appended and not seq.is_trusted:
            self.quarantine.tokens_sampled(seq)
        seq.inflight -= 1
        seq.num_drafts = 0
        seq.is_deferred = False
        if seq.slot is not None:  # else the sequence was preempted meanwhile, and nothing computed for it counts
            seq.scheduled += num_accepted
        if reason is None and len(seq.tokens) >= seq.max_length:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.finish(seq, reason)
        return appended

    def _vacate_background(self) -> None:
        if are_background(self._running):
            while self._running:
                self._preempt(self._running[-1])

    def _preempt_for_waiting(self) -> None:
        if not self._waiting.is_background:
            self._vacate_background()
        if over_share := self.admission.preemptible_for_place(self._running):
            for seq in reversed(over_share):
                self._preempt(seq)
        elif (newest := self.admission.preemptible_for_next(self._running)) is not None:
            self._preempt(newest)

    # The rows of a step.

    def _add_decodes(self, step: _InFlightStep) -> tuple[list[Sequence], int]:
        """Add a row for each sequence with one token to compute. Returns the sequences with more, and the step's remaining
        budget."""
        batch, block_size, has_window = step.batch, self.admission.pool.block_size, self.admission.has_window
        max_drafts = self.speculation.max_drafts_per_row(len(self._running))
        step.learns = max_drafts > 0
        price = PRICE_ALONE
        if max_drafts:
            price = self.speculation.price(len(self._running), self.num_waiting - self.num_background_waiting)
        prefills: list[Sequence] = []
        num_tokens = 0
        # Oldest first: a preempted sequence is never older than the one that needs the blocks, so it comes later in this loop.
        for seq in self._running:
            start, length = seq.scheduled, len(seq.tokens) + seq.inflight
            if length - start != 1 or length >= seq.max_length or seq.num_drafts:
                if start < length and not seq.inflight and self._has_blocks_for_chunk(seq, batch.grow):
                    prefills.append(seq)
                continue
            if has_window:
                self.admission.release_behind_window(seq)
            drafts: list[int] = []
            if max_drafts and not seq.is_deferred and (seq.drafting is not None or seq.forced[1]):
                drafts = self._propose(seq, min(max_drafts, seq.max_length - length - 1), price)
                if drafts and seq.inflight:
                    continue  # the position of its next drafts is not known yet
            if length > len(seq.blocks) * block_size and not self._grow(seq, length, batch.grow):
                continue
            if drafts and not self._grow(seq, length + len(drafts), batch.grow, preempts=False):
                del drafts[len(seq.blocks) * block_size - length :]
            assert seq.slot is not None
            if drafts:
                batch.drafts.append(Draft(seq.slot, length, drafts))
            step.add(seq, Row(seq.slot, start, 1 + len(drafts), True, len(drafts)))
            num_tokens += 1 + len(drafts)
        return prefills, self.config.max_step_tokens - num_tokens

    def _propose(self, seq: Sequence, limit: int, price: DraftPrice) -> list[int]:
        """Drafts from the sequence's next position on: the tokens that its grammar forces, else those that prompt lookup
        proposes."""
        start, forced = seq.forced
        position = seq.length + seq.inflight
        ahead = forced[position - start :][:limit] if position >= start else []
        if price.pays_for_certain(len(ahead)):
            return ahead
        if seq.drafting is None:
            return []
        return self.speculation.propose(seq.drafting, seq.tokens, limit, price, ignore_eos=seq.params.ignore_eos)

    def _add_shorter(self, prefills: list[Sequence], step: _InFlightStep, budget: int) -> int:
        """Add rows for prompts that may overtake the oldest one, running and waiting ones, the shortest first; they leave
        `prefills`. Returns the budget of the others."""
        oldest, *others = prefills
        shorter = sorted(
            (seq for seq in others if overtakes(seq, seq.num_pending, oldest)),
            key=lambda seq: (seq.terms.priority, seq.num_pending),
        )
        left = share = for_shorter(budget)
        while left:
            if (seq := self._admit(step, shorter[0] if shorter else oldest)) is None:
                if not shorter:
                    break
                seq = shorter.pop(0)
                prefills.remove(seq)
            left -= self._add_prefill(seq, step, left)
        return self.prompt_budget.for_oldest(budget, share - left)

    def _admit(self, step: _InFlightStep, older: Sequence | None = None) -> Sequence | None:
        """Admit a waiting sequence to the step; its first row is to follow. older: one that may overtake this prompt."""
        if step.batch.adapters:  # all streams wait while an adapter is loaded, so a step loads one
            return None
        running, admission = self._running, self.admission
        admitted = admission.admit_next(running) if older is None else admission.admit_before(older, running)
        if admitted is None:
            return None
        place, load = self.adapter_places.take(admitted, running)
        if load is not None:
            step.batch.adapters.append(load)
        running.append(admitted)
        step.batch.admit.append(SlotInit.of(admitted, self.config.stop_ids, place))
        return admitted

    def _add_prefill(self, seq: Sequence, step: _InFlightStep, budget: int) -> int:
        """Add a row for as many of the sequence's known tokens as the budget allows. Returns their number."""
        end = self.window.row_end(seq.scheduled, min(seq.length, seq.scheduled + budget))
        count = end - seq.scheduled
        if count:
            assert seq.slot is not None and end <= len(seq.blocks) * self.pool.block_size
            step.add(seq, Row(seq.slot, seq.scheduled, count, end == seq.length < seq.max_length))
            step.num_prompt_tokens += count
            self.admission.prefixes.register(seq)
        return count

    def _has_blocks_for_chunk(self, seq: Sequence, grow: list[Grow]) -> bool:
        """Give a prompt its next chunk's blocks: it was admitted with all its blocks, or with as many as a window needs."""
        self.admission.release_behind_window(seq)
        return self._grow(seq, self.window.row_end(seq.scheduled, seq.length), grow)

    def _grow(self, seq: Sequence, end: int, grow: list[Grow], *, preempts: bool = True) -> bool:
        """Allocate blocks for positions 0 .. end, if need be those of the sequences admitted last. False if none are left: none
        are free, or `seq` itself was admitted last."""
        assert seq.slot is not None
        slot, needed = seq.slot, self.pool.blocks_for(end) - len(seq.blocks)
        if needed <= 0:
            return True
        self.admission.prefixes.register(seq)
        while (blocks := self.pool.try_allocate(needed)) is None:
            if not preempts:
                return False
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is seq:
                return False
        seq.blocks += blocks
        grow += [Grow(slot, block) for block in blocks]
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Running -> waiting, before its owner's others. Its full blocks may still be found when it is admitted again."""
        self.admission.queue(self._vacate(seq))
        self.num_preemptions += 1

    def _vacate(self, seq: Sequence) -> Sequence:
        """End the run of a sequence whose tokens stay."""
        self._running.remove(seq)
        self.admission.vacate(seq)
        seq.scheduled, seq.num_expected = 0, seq.length
        return seq
