"""Rank 0's grammars by slot: which tokens they allow a step's rows, computed beside the forward pass.

A slot's matcher follows the tokens generated so far, which a preempted sequence or new ranks have from their `SlotInit`. One
thread makes the masks of all rows. Another one compiles grammars, and reads the tokens of a resumed answer.

A row without a mask is deferred: a later step samples for it, so that the tokens stay the same, and other rows do not wait.
This holds while its grammar is compiled; and slow rows together have a quarter of the thread's time where the step has other
rows. An answer ends with an error when three of its masks have taken too long. Under torchrun, ranks schedule for themselves
and do not learn what rank 0 defers, so rank 0 waits there.

On a GPU, the thread waits for the tokens of the step before in the copy that the host reads anyway, so that the thread which
queues steps never waits for the device.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from llama_core.grammar.matchers import GrammarRefused, MatcherFailed, Matchers, check, take
from llama_core.log_lines import where
from llama_core.scheduling.step import Draft, ForcedTokens, Row, SlotInit

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

_SLOW_S: Final = 0.02  # of processor time: of one mask
_MOST_SLOW: Final = 3  # such masks end the answer
_QUICK_S: Final = 0.001  # rows whose latest mask took no longer are not slow
_PAUSES: Final = 3  # beside other rows, slow rows wait for so many times as long as the latest slow mask took
# A step waits for grammars that are compiled for half of the time between the last two steps, within these bounds.
_LEAST_WAIT_S: Final = 0.001
_LONGEST_WAIT_S: Final = 0.05  # also where the step has no other rows: the wait delays a request that comes now
_MAX_FORCED: Final = 16  # most forced tokens of a row that are reported; drafts are fewer


@dataclass(slots=True, eq=False)
class _Slot:
    """A slot whose sequence has a grammar. Only the thread of the masks reads and writes `tokens` and what follows `drafts`.

    first: the position of the answer's first token. tokens: of the answer, as far as the thread has read the steps' samples.
    matcher: has taken `num_taken` of `tokens`; None until it is made. mask_s: seconds of processor time of the latest mask.
    deferred_at: the position of the first sample that was deferred; -1 after a refusal.
    """

    scope: str  # `SlotInit.cache_scope`
    grammar: str
    first: int
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)  # of the step that begins
    matcher: "LLMatcher | None" = None
    making: "Future[LLMatcher] | None" = None
    num_taken: int = 0
    mask_s: float = 0.0
    num_slow: int = 0
    is_second_try: bool = False
    deferred_at: int | None = None


@dataclass(slots=True, eq=False)
class _Row:
    """One row: its samples are sample .. end of the step, its first sampled position is `position`. drafts: proposed for
    `position` and after."""

    row: int
    sample: int
    end: int
    position: int
    slot: _Slot
    drafts: list[int]


@dataclass(slots=True, eq=False)
class GrammarMasks:
    """The tokens that grammars allow, for the samples of one step. A thread computes them beside the forward pass.

    bits: uint32 [samples, ceil(vocab / 32)]. has_mask: whether each sample's row has a grammar. is_ready: uint32 [samples], set
    when a sample's bits are written. is_done: whether `wait` would return at once.

    may_pause: slow rows may be deferred for the sake of others. After `wait`: reasons: why a sample has no token, by its index.
    forced: tokens that grammars leave no choice but to generate. deferred: samples that are left to a later step.
    """

    bits: np.ndarray
    has_mask: list[bool]
    is_ready: np.ndarray
    rows: list[_Row]
    may_pause: bool = False
    reasons: dict[int, str] = field(default_factory=dict)
    forced: list[ForcedTokens] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    closed: "Future[None]" = field(default_factory=Future)

    @property
    def is_done(self) -> bool:
        return self.closed.done()

    def wait(self) -> None:
        """Until all bits are written. Raises the error of the step before, if that failed."""
        self.closed.result()

    def note(self, sampled: Seq[int]) -> None:
        """Pass the step's samples on to its slots. The next row's samples replace those after a refused draft."""
        for row in self.rows:
            if row.sample not in self.deferred:
                tokens = row.slot.tokens
                del tokens[row.position - row.slot.first :]
                tokens += sampled[row.sample : row.end]

    def defer(self, row: _Row) -> None:
        if row.slot.deferred_at is None:
            row.slot.deferred_at = row.position
        self.bits[row.sample : row.end] = 0
        self.deferred += range(row.sample, row.end)
        self.is_ready[row.sample : row.end] = 1

    def refuse(self, row: _Row, reason: str) -> None:
        row.slot.deferred_at = -1  # the answer's rows in flight are void
        self.bits[row.sample : row.end] = 0
        self.reasons |= dict.fromkeys(range(row.sample, row.end), reason)
        self.is_ready[row.sample : row.end] = 1


class SlotGrammars:
    """The grammars of all slots of rank 0. has_grammars: whether any slot has one."""

    def __init__(self, vocabulary: "Callable[[], LLTokenizer] | None", vocab_size: int, num_slots: int) -> None:
        """vocabulary: as `Matchers` has it."""
        self._num_words = -(-vocab_size // 32)
        self._slots: list[_Slot | None] = [None] * num_slots
        self.has_grammars = False
        self._matchers = Matchers(vocabulary)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._defers = False
        self._began_s = 0.0  # when the latest step began, by time.monotonic
        self._slow_again_s = 0.0  # when the next slow row may have its masks
        # Of the latest step with masks: its masks, and what reads its samples.
        self._latest: tuple[GrammarMasks, Callable[[], Seq[int]]] | None = None

    def prepare(self) -> None:
        """Load the vocabulary in the background. From now on rows may be deferred."""
        self._defers = True
        self._matchers.prepare()

    def admit(self, init: SlotInit) -> None:
        if (ended := self._slots[init.slot]) is not None and ended.making is not None:
            ended.making.cancel()
        grammar = init.params.grammar
        first = len(init.tokens) if init.prompt_length is None else init.prompt_length
        self._slots[init.slot] = _Slot(init.cache_scope, grammar, first, init.tokens[first:]) if grammar else None
        self.has_grammars = any(each is not None for each in self._slots)

    def propose(self, draft: Draft) -> None:
        if (slot := self._slots[draft.slot]) is not None:
            slot.drafts = draft.tokens

    def begin(self, rows: Seq[Row]) -> GrammarMasks | None:
        """Begin to compute the masks of a step; None where no sampling row has a grammar.

        Before the next call, `follow` must be called, and the sampling of this step queued."""
        now_s = time.monotonic()
        since_last_s, self._began_s = now_s - self._began_s, now_s
        found: list[_Row] = []
        has_mask: list[bool] = []
        for i, row in enumerate(rows):
            if not row.samples:
                continue
            slot = self._slots[row.slot]
            if slot is not None:
                position = row.start + row.length - row.num_drafts
                sample = len(has_mask)
                found.append(
                    _Row(i, sample, sample + 1 + row.num_drafts, position, slot, slot.drafts[: row.num_drafts])
                )
            has_mask += [slot is not None] * (1 + row.num_drafts)
        if not found:
            return None
        num_samples = len(has_mask)
        bits, is_ready = np.empty((num_samples, self._num_words), np.uint32), np.zeros(num_samples, np.uint32)
        masks = GrammarMasks(bits, has_mask, is_ready, found)
        latest, self._latest = self._latest, None
        has_others = len(found) < len(rows)
        masks.may_pause = self._defers and has_others
        longest_s = since_last_s / 2 if has_others else _LONGEST_WAIT_S
        self._thread.submit(self._fill, masks, latest, min(_LONGEST_WAIT_S, max(_LEAST_WAIT_S, longest_s)))
        return masks

    def follow(self, masks: GrammarMasks, sampled: Callable[[], Seq[int]]) -> None:
        """Note that the step of `masks` was started. sampled: waits for its tokens and returns them, 0 where there is none."""
        self._latest = masks, sampled

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._matchers.close()

    def _fill(
        self, masks: GrammarMasks, latest: tuple[GrammarMasks, Callable[[], Seq[int]]] | None, wait_s: float
    ) -> None:
        try:
            if latest is not None:
                before, read = latest
                before.note(read())
            deadline_s = time.monotonic() + wait_s
            for row in sorted(masks.rows, key=lambda each: _lateness(each.slot)):
                if row.slot.mask_s > _QUICK_S and masks.may_pause and time.monotonic() < self._slow_again_s:
                    masks.defer(row)
                    continue
                self._fill_row(row, masks, deadline_s)
                if row.slot.mask_s > _QUICK_S:
                    self._slow_again_s = time.monotonic() + _PAUSES * row.slot.mask_s
            masks.closed.set_result(None)
        except Exception as error:  # of the step before
            masks.closed.set_exception(error)

    def _fill_row(self, row: _Row, masks: GrammarMasks, deadline_s: float) -> None:
        """Find the masks of the row's samples, or defer them."""
        slot = row.slot
        if slot.deferred_at is not None and slot.deferred_at != row.position:
            masks.defer(row)  # an earlier sample was deferred, so the token before this one is undefined
            return
        try:
            if slot.matcher is None and not self._made(row, deadline_s):
                masks.defer(row)
                return
            forced = self._match(row, masks.bits[row.sample : row.end])
        except MatcherFailed as failed:
            # Copies of a compiled grammar share its limits: an answer does not depend on others.
            if slot.is_second_try:
                if row.position == slot.first:  # as every answer begins
                    self._matchers.refuse(slot.scope, slot.grammar, str(failed))
                masks.refuse(row, str(failed))
                return
            self._matchers.drop(slot.scope, slot.grammar)
            slot.is_second_try, slot.matcher, slot.making = True, None, None
            self._fill_row(row, masks, deadline_s)
            return
        except GrammarRefused as refused:
            masks.refuse(row, str(refused))
            return
        except Exception as error:
            log.error("a grammar could not be followed\n%s", where(error))
            masks.refuse(row, "the grammar could not be followed")
            return
        slot.deferred_at = None
        if len(forced) > 1:
            masks.forced.append(ForcedTokens(row.row, row.position, forced[:_MAX_FORCED]))
        masks.is_ready[row.sample : row.end] = 1  # the bits were written before

    def _match(self, row: _Row, bits: np.ndarray) -> list[int]:
        """Write the masks of the row's samples to `bits`. Returns the tokens that the grammar forces. Raises GrammarRefused."""
        slot, begin_s = row.slot, time.thread_time()
        matcher = slot.matcher
        assert matcher is not None
        end = row.position - slot.first
        take(matcher, slot.tokens[slot.num_taken : end])
        slot.num_taken = end
        forced: list[int] = []
        if row.drafts:
            matcher = matcher.deep_copy()  # llguidance's rollback leaves wrong masks
        for i in range(1 + len(row.drafts)):
            matcher.unsafe_compute_mask_ptr(bits[i].ctypes.data, bits[i].nbytes)
            check(matcher)
            if i == len(row.drafts) or matcher.is_stopped() or not matcher.try_consume_tokens([row.drafts[i]]):
                bits[i + 1 :] = 0  # samples after a draft that the grammar refuses are dropped
                break
        if not row.drafts:
            forced = matcher.compute_ff_tokens()
        check(matcher)
        slot.mask_s = (time.thread_time() - begin_s) / (1 + len(row.drafts))
        slot.num_slow += slot.mask_s > _SLOW_S
        if slot.num_slow == _MOST_SLOW:
            raise GrammarRefused(
                f"the grammar is too slow: {_MOST_SLOW} tokens took more than {_SLOW_S * 1e3:g} ms each: simplify it"
            )
        return forced

    def _made(self, row: _Row, deadline_s: float) -> bool:
        """Make the matcher of the row's slot; False where that takes longer than allowed. Raises GrammarRefused."""
        slot = row.slot
        if slot.making is None:
            slot.num_taken = row.position - slot.first
            tokens = slot.tokens[: slot.num_taken]  # those after it may be samples after a refused draft
            slot.making = self._matchers.begin(slot.scope, slot.grammar, tokens, is_alone=slot.is_second_try)
        if self._defers and not wait([slot.making], max(0.0, deadline_s - time.monotonic())).done:
            return False
        slot.matcher, slot.making = slot.making.result(), None
        return True


def _lateness(slot: _Slot) -> tuple[bool, bool, bool]:
    """Orders the rows of a step: rows that may be late come last, and of these first the row that was deferred."""
    return slot.matcher is None, slot.mask_s > _QUICK_S, slot.deferred_at is None
