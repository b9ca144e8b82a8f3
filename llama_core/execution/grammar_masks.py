"""Rank 0's matchers: which tokens the grammars of a step's rows allow, computed beside the forward pass.

A matcher belongs to a slot. It is made from the slot's grammar and follows the tokens generated so far, which a preempted
sequence or new ranks have from their `SlotInit`. One thread makes matchers and masks; a sampler waits for the masks of its own
rows, not for others'. A matcher that exceeds the limits of time and memory refuses its row only.

On a GPU, the thread waits for the tokens of the step before in the copy that the host reads anyway, so that the thread which
queues steps never waits for the device.

Matchers of one grammar share what they have built, and so the limits. Where one exceeds them, the row's grammar is compiled
again for it alone, so that an answer does not depend on earlier ones.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from llama_core.execution.item_text import UniqueLists
from llama_core.execution.json_ending import JsonEnding
from llama_core.execution.json_lookahead import Lookahead
from llama_core.execution.json_vocabulary import JsonVocabulary
from llama_core.execution.unique_items import ItemTokens, UniqueItems
from llama_core.log_lines import where
from llama_core.scheduling.step import Draft, ForcedTokens, Row, SlotInit

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

_KEPT_GRAMMARS: Final = 16  # compiled grammars that later requests with the same one copy
_NEAR: Final = 8  # tokens beyond the closing path, more than those below which the model has no choice
_MAX_FORCED: Final = 16  # tokens of a row that are reported; drafts are fewer
_NO_OTHER_ITEM: Final = "the grammar cannot be followed: no other item of a list with unique items is left"
_UNAVAILABLE: Final = "this engine has no tokenizer, so that it cannot follow grammars"


@dataclass(slots=True)
class _Slot:
    """Only the thread reads and writes what follows `drafts`, and `tokens`."""

    grammar: str
    first: int  # the position of the answer's first token
    tokens: list[int]  # of the answer, as far as the thread has read the steps' samples
    limit: int | None  # the position behind the last token that may be sampled; None: the end is not brought about
    position: int  # of the first token that no row's matcher was given
    drafts: list[int] = field(default_factory=list)  # of the step that begins
    matcher: "LLMatcher | None" = None
    ending: JsonEnding | None = None  # of JSON and calls of tools, made with the matcher
    unique: UniqueItems | None = None  # of JSON with lists of distinct items, made with the matcher


@dataclass(frozen=True, slots=True)
class _Grammar:
    """ahead: None for a grammar whose text is not JSON. lists: None for one without lists of distinct items."""

    compiled: "LLMatcher"
    ahead: Lookahead | None
    lists: UniqueLists | None


@dataclass(frozen=True, slots=True)
class _Job:
    """One row: its samples begin at `sample` of the step, its first sampled position is `position`. begin: the position of the
    first token that the matcher has not consumed. drafts: proposed for `position` and after."""

    row: int
    sample: int
    begin: int
    position: int
    slot: _Slot
    drafts: list[int]

    @property
    def samples(self) -> range:
        return range(self.sample, self.sample + 1 + len(self.drafts))

    def note(self, sampled: Seq[int]) -> None:
        """The step's samples follow the slot's tokens. Those behind a refused draft are replaced by the next row's."""
        del self.slot.tokens[self.position - self.slot.first :]
        self.slot.tokens += sampled[self.samples.start : self.samples.stop]


@dataclass(slots=True)
class GrammarMasks:
    """The masks of one step: `execution.backend.StepMasks`. After `wait`: the reason of each sample that has no token, the
    tokens that grammars leave no choice but to generate, and the samples that lost a text so that the answer ends in time
    (`json_ending`)."""

    bits: np.ndarray
    has_mask: list[bool]
    is_ready: np.ndarray
    jobs: Seq[_Job] = ()
    reasons: dict[int, str] = field(default_factory=dict)
    forced: list[ForcedTokens] = field(default_factory=list)
    shortened: list[int] = field(default_factory=list)
    work: "Future[None] | None" = None

    @property
    def is_done(self) -> bool:
        return self.work is not None and self.work.done()

    def wait(self) -> None:
        assert self.work is not None
        self.work.result()


class SlotGrammars:
    """The grammars of all slots of rank 0. has_grammars: whether any slot has one.

    `vocabulary` is called once, in the thread, by `prepare` or for the first grammar; None: every grammar is refused."""

    def __init__(
        self, vocabulary: "Callable[[], LLTokenizer] | None", vocab_size: int, num_slots: int, max_seq_len: int
    ) -> None:
        self._max_seq_len = max_seq_len
        self._slots: list[_Slot | None] = [None] * num_slots
        self.has_grammars = False
        self._num_words = -(-vocab_size // 32)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiled: OrderedDict[str, _Grammar] = OrderedDict()
        self._load = vocabulary
        self._vocabulary: LLTokenizer | None = None
        self._json: JsonVocabulary | None = None
        self._items: ItemTokens | None = None  # made by `prepare`, or for the first grammar with such lists
        # Of the latest step with masks: its rows, and what reads its samples.
        self._latest: tuple[Seq[_Job], Callable[[], Seq[int]]] | None = None

    def prepare(self) -> None:
        if self._load is not None:
            self._thread.submit(self._prepare)

    def admit(self, init: SlotInit) -> None:
        grammar = init.params.grammar
        begin = len(init.tokens) if init.prompt_length is None else init.prompt_length
        generated = init.tokens[begin:] if grammar else []
        params = init.params
        limit = min(begin + params.max_tokens, self._max_seq_len)
        # These rules may forbid the tokens that close.
        closes = not (params.allowed_token_ids or params.bad_words or params.min_tokens)
        slot = _Slot(grammar, begin, generated, limit if closes else None, begin) if grammar else None
        self._slots[init.slot] = slot
        self.has_grammars = bool(grammar) or any(slot is not None for slot in self._slots)

    def propose(self, draft: Draft) -> None:
        slot = self._slots[draft.slot]
        if slot is not None:
            slot.drafts = draft.tokens

    def begin(self, rows: Seq[Row]) -> GrammarMasks | None:
        """Begin to compute the masks of a step; None where no sampling row has a grammar. `follow` comes before the next call,
        and the samples of the step before are queued."""
        if not self.has_grammars:
            return None
        jobs: list[_Job] = []
        has_mask: list[bool] = []
        for i, row in enumerate(rows):
            if not row.samples:
                continue
            slot = self._slots[row.slot]
            if slot is not None:
                jobs.append(self._job(i, len(has_mask), row, slot))
            has_mask += [slot is not None] * (1 + row.num_drafts)
        if not jobs:
            return None
        num_samples = len(has_mask)
        masks = GrammarMasks(
            np.empty((num_samples, self._num_words), np.uint32), has_mask, np.zeros(num_samples, np.uint32), jobs
        )
        latest, self._latest = self._latest, None
        masks.work = self._thread.submit(self._fill, masks, latest)
        return masks

    def follow(self, masks: GrammarMasks, sampled: Callable[[], Seq[int]]) -> None:
        """The step of `masks` was started. sampled: its tokens, which the thread waits for; 0 where there is none."""
        self._latest = masks.jobs, sampled

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _job(index: int, sample: int, row: Row, slot: _Slot) -> _Job:
        position = row.start + row.length - row.num_drafts
        begin, slot.position = slot.position, position
        return _Job(index, sample, begin, position, slot, slot.drafts[: row.num_drafts])

    def _fill(self, masks: GrammarMasks, latest: tuple[Seq[_Job], Callable[[], Seq[int]]] | None) -> None:
        if latest is not None:
            jobs, read = latest
            sampled = read()
            for job in jobs:
                job.note(sampled)
        for job in masks.jobs:
            samples = job.samples
            try:
                self._fill_row(job, masks)
            except _Refused as refused:
                self._compiled.pop(job.slot.grammar, None)  # a matcher beyond its limits breaks others of its grammar
                masks.bits[samples.start : samples.stop] = 0
                masks.reasons |= dict.fromkeys(samples, str(refused))
            except Exception as error:
                log.error("a grammar could not be followed\n%s", where(error))
                masks.bits[samples.start : samples.stop] = 0
                masks.reasons |= dict.fromkeys(samples, "the grammar could not be followed")
            masks.is_ready[samples.start : samples.stop] = 1  # the bits were written before, in this thread

    def _fill_row(self, job: _Job, masks: GrammarMasks) -> None:
        """Write the bits of the row's samples, each after the drafts before it."""
        slot, num_forced, num_shortened = job.slot, len(masks.forced), len(masks.shortened)
        try:
            self._match_row(job, masks)
        except Exception as error:
            if isinstance(error, _Exceeded):
                self._compiled.pop(slot.grammar, None)
            elif isinstance(error, _Refused) or slot.ending is None:
                raise
            else:
                log.error("looking ahead failed: the answer is not brought to its end\n%s", where(error))
                slot.limit = None
            slot.matcher = slot.ending = slot.unique = None
            del masks.forced[num_forced:], masks.shortened[num_shortened:]
            self._match_row(replace(job, begin=slot.first), masks)

    def _match_row(self, job: _Job, masks: GrammarMasks) -> None:
        slot = job.slot
        tokens = slot.tokens[job.begin - slot.first : job.position - slot.first]
        assert len(tokens) == job.position - job.begin, "the samples of earlier steps were read"
        if slot.matcher is None:
            self._begin_matching(slot, job.begin)
        matcher, ending, unique = slot.matcher, slot.ending, slot.unique
        assert matcher is not None
        if matcher.try_consume_tokens(tokens) < len(tokens) and not matcher.is_stopped():
            unused = masks.bits[job.sample]
            matcher.unsafe_compute_mask_ptr(unused.ctypes.data, unused.nbytes)  # tells whether a limit is exceeded
            _check(matcher)
            raise _Refused("the tokens generated so far do not follow the grammar")
        if ending is not None:
            ending.append(tokens, job.begin)
        if unique is not None:
            unique.append(tokens)
        if job.drafts:  # on copies: taking tokens back leaves masks behind them (`closing_path`)
            matcher = matcher.deep_copy()
            ending = None if ending is None else ending.copy()
            unique = None if unique is None else unique.copy()
        for i in range(1 + len(job.drafts)):
            bits = masks.bits[job.sample + i]
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            _check(matcher)
            if unique is not None and bits.any():
                unique.narrow(bits, matcher)
                if not bits.any():
                    masks.reasons[job.sample + i] = _NO_OTHER_ITEM
            is_shortened = ending is not None and ending.narrow(bits, job.position + i)
            if unique is not None and ending is not None and _is_near_end(ending, job.position + i):
                is_shortened |= unique.lead_out(bits)
            if is_shortened:
                masks.shortened.append(job.sample + i)
            is_last = i == len(job.drafts) or (unique is not None and not _is_set(bits, job.drafts[i]))
            if is_last or matcher.is_stopped() or not matcher.try_consume_tokens([job.drafts[i]]):
                masks.bits[job.sample + i + 1 : job.sample + 1 + len(job.drafts)] = 0
                break  # what is sampled behind a draft that the grammar refuses is dropped
            if ending is not None:
                ending.append([job.drafts[i]], job.position + i)
            if unique is not None:
                unique.append([job.drafts[i]])
        if not job.drafts and len(forced := matcher.compute_ff_tokens()) > 1:
            forced = forced if unique is None else unique.distinct(forced)
            if len(forced) > 1:
                masks.forced.append(ForcedTokens(job.row, job.position, forced[:_MAX_FORCED]))
        _check(matcher)

    def _begin_matching(self, slot: _Slot, begin: int) -> None:
        kept = self._compiled.pop(slot.grammar, None)
        if kept is None or (kept.ahead is not None and kept.ahead.is_broken):
            grammar = slot.grammar
            kept = _Grammar(self._compile(grammar), self._lookahead(grammar), self._unique_lists(grammar))
        self._compiled[slot.grammar] = kept
        if len(self._compiled) > _KEPT_GRAMMARS:
            self._compiled.popitem(last=False)
        slot.matcher = kept.compiled.deep_copy()
        if kept.ahead is not None and kept.ahead.num_watched and slot.limit is not None:
            slot.ending = JsonEnding.of(kept.ahead, begin, slot.limit)
        if kept.lists is not None:
            self._items = self._items or ItemTokens(self._loaded()[1])
            slot.unique = UniqueItems.of(self._items, kept.lists)

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher  # the engine runs without it where no request has a grammar

        from llama_core.text.grammar import limits

        compiled = LLMatcher(self._loaded()[0], grammar, log_level=0, limits=limits(grammar))
        _check(compiled)
        return compiled

    def _lookahead(self, grammar: str) -> Lookahead | None:
        from llama_core.text.grammar import begins_with_text, is_of_schema, json_description

        description = json_description(grammar)
        if not description:
            return None
        has_text, is_schema = begins_with_text(grammar), is_of_schema(grammar)
        compiled, vocabulary = partial(self._compile, grammar), self._loaded()[1]
        try:
            return Lookahead(compiled, vocabulary, description, begins_with_text=has_text, is_schema=is_schema)
        except Exception as error:
            log.error("looking ahead failed: answers are not brought to their end\n%s", where(error))
            return None

    def _prepare(self) -> None:
        vocabulary = self._loaded()[1]
        vocabulary.prepare()
        self._items = self._items or ItemTokens(vocabulary)

    def _unique_lists(self, grammar: str) -> UniqueLists | None:
        from llama_core.text.grammar import unique_lists_of

        lists = unique_lists_of(grammar)
        return None if lists is None else UniqueLists(lists)

    def _loaded(self) -> "tuple[LLTokenizer, JsonVocabulary]":
        if self._load is None:
            raise _Refused(_UNAVAILABLE)
        if self._vocabulary is None or self._json is None:
            self._vocabulary = self._load()
            self._json = JsonVocabulary(self._vocabulary, self._num_words)
        return self._vocabulary, self._json


def _is_near_end(ending: JsonEnding, position: int) -> bool:
    """Whether an item must end soon, so that it may not become an earlier one."""
    path = ending.place.path
    return ending.limit - position - len(path) < _NEAR if path else False


def _is_set(bits: np.ndarray, token: int) -> bool:
    return bool(bits[token // 32] >> np.uint32(token % 32) & 1)


class _Refused(Exception):
    """The row's next token cannot be decided."""


class _Exceeded(_Refused):
    """The matcher has exceeded the limits of time and memory."""


def _check(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        from llama_core.text.grammar_words import lark_words
        from llama_core.text.schema_faults import schema_reason

        raise _Exceeded(f"the grammar cannot be followed: {lark_words(matcher.get_error(), schema_reason)}")
