"""Rank 0's grammars by slot: which tokens they allow a step's rows, computed beside the forward pass.

A follower belongs to a slot. It is made from the slot's grammar and follows the tokens generated so far, which a preempted
sequence or new ranks have from their `SlotInit`. One thread makes masks; a sampler waits for the masks of its own rows, not for
others'. A matcher that exceeds the limits of time and memory refuses its row only.

Other rows do not wait for a slow grammar. Other threads compile grammars. A process follows those that llguidance's limits do
not bound, and those whose masks have taken too long here. A row whose mask is not ready when the step needs it is deferred: a
later step samples for it, so that the tokens stay the same. Under torchrun, ranks schedule for themselves and do not learn what
rank 0 defers, so rank 0 waits there.

On a GPU, the thread waits for the tokens of the step before in the copy that the host reads anyway, so that the thread which
queues steps never waits for the device.

docs/architecture.md ("Grammars") follows a deferred row through the modules.
"""

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from llama_core.execution.grammars.follower import (
    AnswerFollower,
    BeginAgain,
    CompiledGrammar,
    CompiledGrammars,
    GrammarRefused,
    RowMasks,
)
from llama_core.execution.grammars.process import GrammarProcess, SlowRow
from llama_core.execution.grammars.rows import GrammarMasks, GrammarRow, GrammarSlot
from llama_core.log_lines import where
from llama_core.scheduling.step import Draft, Row, SlotInit
from llama_core.text.grammar_cost import is_unbounded, may_take_long
from llama_core.text.vocabulary_file import VocabularyFile

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger(__name__)

# A step waits for slow rows for half of the time between the last two steps, within these bounds, so that steps do not become
# longer.
_LEAST_WAIT_S: Final = 0.001
_LONGEST_WAIT_S: Final = 0.05  # also where the step has no other rows: the wait delays a request that comes now
# The longest wait for masks that are computed here, all of a step together. The first mask of a grammar may take 0.2 s.
_LONGEST_HERE_S: Final = 0.02


class SlotGrammars:
    """The grammars of all slots of rank 0. has_grammars: whether any slot has one."""

    def __init__(
        self, vocabulary: "Callable[[], LLTokenizer] | None", vocab_size: int, num_slots: int, max_seq_len: int
    ) -> None:
        """vocabulary: as `CompiledGrammars` has it."""
        self._max_seq_len = max_seq_len
        self._slots: list[GrammarSlot | None] = [None] * num_slots
        self.has_grammars = False
        self._grammars = CompiledGrammars(vocabulary, vocab_size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._watch = ThreadPoolExecutor(1, thread_name_prefix="late-grammars")
        self._lock = threading.Lock()  # between `_thread` and `_watch`, which both decide whether a row is deferred
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._slow_compiler = ThreadPoolExecutor(
            1, thread_name_prefix="slow-grammar-compiler"
        )  # others do not wait for it
        self._compiling: dict[tuple[str, str], Future[CompiledGrammar]] = {}
        self._process: GrammarProcess | None = None  # for slow grammars, where rows may be deferred
        self._vocabulary = vocabulary
        self._defers = False
        self._filling: Future[None] | None = None  # the latest step's masks
        self._keys = count()
        self._began_s = 0.0  # when the latest step began, by time.monotonic
        # Of the latest step with masks: its masks, and what reads its samples.
        self._latest: tuple[GrammarMasks, Callable[[], Seq[int]]] | None = None

    def prepare(self) -> None:
        """Load the vocabulary in the background. From now on rows may be deferred."""
        self._defers = True
        if isinstance(self._vocabulary, VocabularyFile):  # which another process can load too
            self._process = GrammarProcess(self._vocabulary)
        self._compiler.submit(self._grammars.prepare)

    def admit(self, init: SlotInit) -> None:
        slot, params = None, init.params
        if grammar := params.grammar:
            begin = len(init.tokens) if init.prompt_length is None else init.prompt_length
            # These rules may forbid the tokens that close.
            closes = not (params.allowed_token_ids or params.bad_words or params.min_tokens)
            limit = min(begin + params.max_tokens, self._max_seq_len) if closes else None
            slot = GrammarSlot(next(self._keys), init.cache_scope, grammar, begin, limit, init.tokens[begin:])
            slot.is_slow = self._process is not None and is_unbounded(grammar)
        self._set(init.slot, slot)

    def leave(self, slot: int) -> None:
        """The slot's answer has ended."""
        self._set(slot, None)

    def _set(self, index: int, slot: GrammarSlot | None) -> None:
        if (former := self._slots[index]) is not None:
            self._end(former)
        self._slots[index] = slot
        self.has_grammars = slot is not None or any(each is not None for each in self._slots)

    def _end(self, slot: GrammarSlot) -> None:
        """The slot's answer has ended: do not wait for its rows in flight, and cancel those in the process."""
        slot.is_ended = True
        if slot.is_slow and self._process is not None:
            self._process.forget(slot.key)
            if (following := slot.following) is not None:
                following.cancel()

    def propose(self, draft: Draft) -> None:
        slot = self._slots[draft.slot]
        if slot is not None:
            slot.drafts = draft.tokens

    def begin(self, rows: Seq[Row]) -> GrammarMasks | None:
        """Begin to compute the masks of a step; None where no sampling row has a grammar.

        Before the next call, `follow` must be called, and the sampling of this step queued."""
        if not self.has_grammars:
            return None
        now_s = time.monotonic()
        since_last_s, self._began_s = now_s - self._began_s, now_s
        jobs: list[GrammarRow] = []
        has_mask: list[bool] = []
        for i, row in enumerate(rows):
            if not row.samples:
                continue
            slot = self._slots[row.slot]
            if slot is not None:
                position = row.start + row.length - row.num_drafts
                sample = len(has_mask)
                end = sample + 1 + row.num_drafts
                jobs.append(GrammarRow(i, sample, end, position, slot, slot.drafts[: row.num_drafts]))
            has_mask += [slot is not None] * (1 + row.num_drafts)
        if not jobs:
            return None
        num_samples = len(has_mask)
        masks = GrammarMasks(
            np.empty((num_samples, self._grammars.num_words), np.uint32),
            has_mask,
            np.zeros(num_samples, np.uint32),
            jobs,
        )
        latest, self._latest = self._latest, None
        has_others = len(jobs) < len(rows)
        # Most steps have no row that may be late, and take no thread's time for a watch.
        is_late = self._filling is not None and not self._filling.done()
        masks.is_watched = self._defers and (is_late or any(job.slot.may_be_late for job in jobs))
        self._filling = self._thread.submit(self._fill, masks, latest, len(rows), since_last_s)
        if masks.is_watched:
            self._watch.submit(self._defer_late, masks, latest, since_last_s / 2 if has_others else _LONGEST_HERE_S)
        return masks

    def follow(self, masks: GrammarMasks, sampled: Callable[[], Seq[int]]) -> None:
        """Note that the step of `masks` was started. sampled: waits for its tokens and returns them, 0 where there is none."""
        self._latest = masks, sampled

    def close(self) -> None:
        for thread in (self._thread, self._watch, self._compiler, self._slow_compiler):
            thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.close()

    def _fill(
        self,
        masks: GrammarMasks,
        latest: tuple[GrammarMasks, Callable[[], Seq[int]]] | None,
        num_rows: int,
        since_last_s: float,
    ) -> None:
        failure = None
        try:
            if latest is not None:
                before, read = latest
                before.note(read())
            self._fill_rows(masks, num_rows, since_last_s)
        except Exception as error:  # of the step before
            failure = error
        with self._lock:
            if not masks.is_done:
                masks.close(failure)

    def _fill_rows(self, masks: GrammarMasks, num_rows: int, since_last_s: float) -> None:
        late = [job for job in masks.jobs if not self._fill_row(job, masks)]
        if not late:
            return
        longest_s = since_last_s / 2 if len(late) < num_rows else _LONGEST_WAIT_S
        deadline_s = time.monotonic() + min(_LONGEST_WAIT_S, max(_LEAST_WAIT_S, longest_s))
        for job in late:
            while not self._fill_row(job, masks):
                left_s = max(0.0, deadline_s - time.monotonic()) if self._defers else None
                if job.slot.is_pending(left_s):
                    with self._lock:
                        self._defer(job, masks)
                    break

    def _defer_late(
        self,
        masks: GrammarMasks,
        latest: tuple[GrammarMasks, Callable[[], Seq[int]]] | None,
        again_s: float,
    ) -> None:
        """Defer the rows whose masks are not ready in time.

        Runs in a thread of its own, because the thread of the masks may still compute those of an earlier step. again_s: the
        longest wait, in seconds, for a step with a row that was deferred before."""
        if latest is not None:
            latest[1]()  # the masks need the tokens of the step before, so the time counts from here
        is_again = any(job.slot.deferred_at is not None for job in masks.jobs)
        longest_s = min(_LONGEST_HERE_S, max(_LEAST_WAIT_S, again_s)) if is_again else _LONGEST_HERE_S
        if wait([masks.closed], longest_s).done:
            return
        with self._lock:
            if not masks.is_done:
                for job in masks.jobs:
                    self._defer(job, masks)
                masks.close()

    @staticmethod
    def _defer(job: GrammarRow, masks: GrammarMasks) -> None:
        if not masks.is_ready[job.sample]:
            if job.slot.deferred_at is None:
                job.slot.deferred_at = job.position
            masks.allow_nothing(job, None)

    def _fill_row(self, job: GrammarRow, masks: GrammarMasks) -> bool:
        """Find the masks of the row's samples. Returns False while the row `is_pending`. Masks found too late are kept for the
        slot's next row."""
        slot = job.slot
        if masks.is_watched:
            with self._lock:
                if masks.is_ready[job.sample] and (
                    job.is_void or slot.following is not None or slot.compiling is not None
                ):
                    return True
        if job.is_void:
            with self._lock:
                self._defer(job, masks)
            return True
        found, refused = None, None
        try:
            found = self._row_masks(job, masks)
            if found is None:
                return False
        except GrammarRefused as error:
            self._grammars.drop(slot.scope, slot.grammar)
            refused = error.with_traceback(None)
        except Exception as error:
            log.error("a grammar could not be followed\n%s", where(error))
            refused = GrammarRefused("the grammar could not be followed")
        if masks.is_watched:
            with self._lock:
                if masks.is_ready[job.sample]:  # it was deferred meanwhile
                    slot.following = _done(found, refused)
                    return True
                self._settle(job, masks, found, refused)
        else:
            self._settle(job, masks, found, refused)
        return True

    def _settle(
        self, job: GrammarRow, masks: GrammarMasks, found: RowMasks | None, refused: GrammarRefused | None
    ) -> None:
        """Give the row its masks. found: None ends the answer with `refused`, and makes its rows in flight void."""
        if found is None:
            masks.allow_nothing(job, refused)
            job.slot.deferred_at = job.position if self._defers else None
        else:
            job.slot.deferred_at = None
            masks.has(job, found)

    def _row_masks(self, job: GrammarRow, masks: GrammarMasks) -> RowMasks | None:
        """None while the row `is_pending`. Raises GrammarRefused."""
        slot, num_samples = job.slot, job.end - job.sample
        while slot.following is None and not slot.is_slow:
            compiled = self._compiled(slot)
            if compiled is None:
                return None
            if compiled.is_slow and self._process is not None:
                slot.is_slow, slot.follower = True, None
                break
            if slot.follower is None:
                slot.follower = AnswerFollower(slot.grammar, slot.first, slot.limit)
            if not slot.follower.has_begun:
                slot.follower.begin(compiled, self._grammars)
            began_s = time.monotonic()
            try:
                if not slot.follower.reads_more(slot.tokens, job.position):
                    bits = masks.bits[job.sample : job.end]
                    if masks.is_watched:  # the watching thread may close the step, whose bits are read then
                        bits = np.empty_like(bits)
                    return slot.follower.masks(slot.tokens, job.position, job.drafts, bits)
            except BeginAgain as again:
                slot.compiled = None
                if again.is_beyond_limits:
                    self._grammars.drop(slot.scope, slot.grammar)
                    slot.compiling = self._compiler_of(slot.grammar).submit(self._grammars.compiled_alone, slot.grammar)
            finally:
                compiled.count(time.monotonic() - began_s)
        if slot.following is None:
            assert self._process is not None
            tokens = slot.tokens[: job.position - slot.first]
            row = SlowRow(slot.key, slot.scope, slot.grammar, slot.first, slot.limit, tokens, job.drafts)
            slot.following = self._process.submit(row)
        if not slot.following.done():
            return None
        following, slot.following = slot.following, None
        return following.result().of_first(num_samples)

    def _compiled(self, slot: GrammarSlot) -> CompiledGrammar | None:
        """The slot's grammar, None while it is compiled. Raises GrammarRefused."""
        if slot.compiled is None and slot.compiling is not None:
            if not slot.compiling.done():
                return None
            compiling, slot.compiling = slot.compiling, None
            slot.compiled = compiling.result()
        if slot.compiled is None and (found := self._grammars.find(slot.scope, slot.grammar)) is not None:
            slot.compiled = found
        if slot.compiled is None:
            slot.compiling = self._compile(slot.scope, slot.grammar)
        return slot.compiled

    def _compile(self, scope: str, grammar: str) -> "Future[CompiledGrammar]":
        self._compiling = {each: compiling for each, compiling in self._compiling.items() if not compiling.done()}
        if (key := (scope, grammar)) not in self._compiling:
            self._compiling[key] = self._compiler_of(grammar).submit(self._grammars.compiled, scope, grammar)
        return self._compiling[key]

    def _compiler_of(self, grammar: str) -> ThreadPoolExecutor:
        return self._slow_compiler if may_take_long(grammar) else self._compiler


def _done(found: RowMasks | None, refused: GrammarRefused | None) -> "Future[RowMasks]":
    """A future that is done. found: None makes it raise `refused`."""
    done = Future[RowMasks]()
    if refused is not None:
        done.set_exception(refused)
    elif found is not None:
        done.set_result(found)
    return done
