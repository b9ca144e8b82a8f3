"""Follows a grammar along one answer: the tokens that it allows next, so that JSON ends in time and list items are distinct.

A follower has no thread and no slot. `masks.py` has a follower for each slot, which runs beside the forward pass. `process.py`
has the followers of grammars that are too slow for that.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from llama_core.execution.grammars.heap import num_heap_bytes
from llama_core.execution.grammars.item_text import UniqueLists
from llama_core.execution.grammars.json_ending import JsonEnding
from llama_core.execution.grammars.json_lookahead import Lookahead
from llama_core.execution.grammars.json_vocabulary import JsonVocabulary
from llama_core.execution.grammars.unique_items import ItemTokens, UniqueItems
from llama_core.log_lines import where
from llama_core.shared_cache import SharedCache

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

# Bytes of the compiled grammars that later requests with the same one copy. Most take up to 3 MB, those with a multiple of 6
# digits up to 140 MB.
_KEPT_BYTES: Final = 2**28
_FOLLOWED_BYTES: Final = 2**23  # that the answers of a grammar add to it: up to 9 MB were measured
# The usual time of a row's masks beside the forward pass, and the time that all masks of a grammar may take beyond that.
_USUAL_S: Final = 0.01
_SPARE_S: Final = 0.1
_MOST_AT_ONCE_S: Final = 0.04  # most of it that one row uses up: a rank may have stood still for a moment
_GIVEN_BACK: Final = 0.1  # share of unused usual time that is given back, for a slow mask now and then
_READ_AT_ONCE: Final = 16  # tokens: an ambiguous grammar may take 20 ms for each
_NEAR: Final = 8  # tokens beyond the closing path; more than `json_ending._FORCED_BELOW`, where the model has no choice
_MAX_FORCED: Final = 16  # most forced tokens of a row that are reported; drafts are fewer
_NO_OTHER_ITEM: Final = "the grammar cannot be followed: no other item of a list with unique items is left"
_UNAVAILABLE: Final = "this engine has no tokenizer, so that it cannot follow grammars"


class GrammarRefused(Exception):
    """The row's next token cannot be decided; the message says why."""


class GrammarUnavailable(GrammarRefused):
    """The server is at fault, not the request."""


class BeginAgain(Exception):
    """The answer must be followed again from its first token. is_beyond_limits: with the grammar compiled for it alone."""

    def __init__(self, *, is_beyond_limits: bool) -> None:
        super().__init__(is_beyond_limits)
        self.is_beyond_limits = is_beyond_limits


class _Exceeded(GrammarRefused):
    """The matcher has exceeded the limits of time and memory."""


@dataclass(slots=True)
class CompiledGrammar:
    """What all answers of one grammar share.

    matcher: the grammar compiled, for copies. ahead: None for a grammar whose text is not JSON. lists: None for a grammar
    without lists of distinct items. num_bytes: an estimate, which counts what other threads allocated while it was compiled.
    spare_s: seconds that its masks may still take beyond the usual time; quick masks give some of it back.
    """

    matcher: "LLMatcher"
    ahead: Lookahead | None
    lists: UniqueLists | None
    num_bytes: int = 0
    spare_s: float = _SPARE_S

    def count(self, seconds: float) -> None:
        """Count the seconds that a row's masks took beside the forward pass."""
        unused_s = max(_USUAL_S - seconds, -_MOST_AT_ONCE_S)
        self.spare_s = min(_SPARE_S, self.spare_s + (unused_s * _GIVEN_BACK if unused_s > 0 else unused_s))

    @property
    def is_quick(self) -> bool:
        """Whether no recent mask has taken more than the usual time."""
        return self.spare_s == _SPARE_S

    @property
    def is_slow(self) -> bool:
        """Whether its masks have used up their time: a process is to follow the grammar."""
        return self.spare_s <= 0


@dataclass(slots=True)
class RowMasks:
    """What a grammar says of the samples of one row, each after the drafts before it.

    bits: uint32 [samples, ceil(vocab / 32)]. forced: tokens that the grammar leaves no choice but to generate. shortened:
    indices of samples that lost a token so that the answer ends in time (`json_ending`). reasons: why a sample has no token, by
    index.
    """

    bits: np.ndarray
    forced: list[int] = field(default_factory=list)
    shortened: list[int] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)

    def of_first(self, num_samples: int) -> "RowMasks":
        """The masks of the same row with fewer drafts."""
        shortened = [i for i in self.shortened if i < num_samples]
        reasons = {i: reason for i, reason in self.reasons.items() if i < num_samples}
        return RowMasks(self.bits[:num_samples], self.forced, shortened, reasons)


class CompiledGrammars:
    """The vocabulary, and the grammars that were used last, by scope: they take up to 256 MB together or are one. An answer
    keeps its own beside them. Several threads may compile, each other grammars.

    `vocabulary` is called once, by `prepare` or for the first grammar; None: every grammar is refused."""

    def __init__(self, vocabulary: "Callable[[], LLTokenizer] | None", vocab_size: int) -> None:
        self.num_words = -(-vocab_size // 32)
        self._load = vocabulary
        self._vocabulary: LLTokenizer | None = None
        self._json: JsonVocabulary | None = None
        self._items: ItemTokens | None = None  # made by `prepare`, or for the first grammar with such lists
        self._kept = SharedCache[CompiledGrammar](_KEPT_BYTES)
        self._loading = threading.Lock()  # of the vocabulary

    def prepare(self) -> None:
        if self._load is not None:
            vocabulary = self._loaded()[1]
            vocabulary.prepare()
            self._items = self._items or ItemTokens(vocabulary)

    @property
    def items(self) -> ItemTokens:
        assert self._items is not None, "a grammar with lists of distinct items is compiled"
        return self._items

    def find(self, scope: str, grammar: str) -> CompiledGrammar | None:
        """The compiled grammar, if it is kept and within its limits."""
        found = self._kept.find(scope, grammar)
        return None if found is None or (found.ahead is not None and found.ahead.is_broken) else found

    def drop(self, scope: str, grammar: str) -> None:
        """Forget the grammar, so that it is compiled again: a matcher that exceeded its limits breaks others of its grammar."""
        self._kept.drop(scope, grammar)

    def compiled(self, scope: str, grammar: str) -> CompiledGrammar:
        """`find`, or compile it. Raises GrammarRefused."""
        if (made := self.find(scope, grammar)) is None:
            made = self.compiled_alone(grammar)
            self._kept.keep(scope, grammar, made, made.num_bytes)
        return made

    def compiled_alone(self, grammar: str) -> CompiledGrammar:
        """Compile it for one answer, with limits that no other shares. Raises GrammarRefused."""
        self._loaded()  # which is not the grammar's
        before = num_heap_bytes()
        parts = self._compile(grammar), self._lookahead(grammar), self._unique_lists(grammar)
        num_bytes = max(num_heap_bytes() - before, len(grammar)) + _FOLLOWED_BYTES
        return CompiledGrammar(*parts, num_bytes=num_bytes)

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

    def _unique_lists(self, grammar: str) -> UniqueLists | None:
        from llama_core.text.grammar import unique_lists_of

        if (lists := unique_lists_of(grammar)) is None:
            return None
        self._items = self._items or ItemTokens(self._loaded()[1])
        return UniqueLists(lists)

    def _loaded(self) -> "tuple[LLTokenizer, JsonVocabulary]":
        if self._load is None:
            raise GrammarRefused(_UNAVAILABLE)
        with self._loading:
            if self._vocabulary is None or self._json is None:
                self._vocabulary = self._load()
                self._json = JsonVocabulary(self._vocabulary, self.num_words)
            return self._vocabulary, self._json


class AnswerFollower:
    """One answer's matcher, with the parts that bring its JSON to an end and keep list items distinct. compiled: the grammar,
    once `begin` was called.

    Matchers of one grammar share llguidance's limits. Where a matcher exceeds them, the answer is followed again from its first
    token with the grammar compiled for it alone, so that an answer does not depend on earlier ones.
    """

    def __init__(self, grammar: str, first: int, limit: int | None) -> None:
        """first: the position of the answer's first token. limit: the position behind the last token that may be sampled;
        None: do not bring the JSON to an end."""
        self.compiled: CompiledGrammar
        self.grammar = grammar
        self.first = first
        self._limit = limit
        self._position = first  # of the first token that the matcher has not consumed
        self._matcher: LLMatcher | None = None
        self._ending: JsonEnding | None = None  # of JSON and calls of tools
        self._unique: UniqueItems | None = None  # of JSON with lists of distinct items
        self._is_second_try = False

    @property
    def has_begun(self) -> bool:
        return self._matcher is not None

    def begin(self, compiled: CompiledGrammar, grammars: CompiledGrammars) -> None:
        """Follow the answer from its first token on. compiled: of `grammars`."""
        self.compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._position = self.first
        self._ending = self._unique = None
        if compiled.ahead is not None and compiled.ahead.num_watched and self._limit is not None:
            self._ending = JsonEnding.of(compiled.ahead, self.first, self._limit)
        if compiled.lists is not None:
            self._unique = UniqueItems.of(grammars.items, compiled.lists)

    def reads_more(self, tokens: list[int], position: int) -> bool:
        """If many tokens before `position` are unread, as in a resumed answer, read some of them. Returns whether it did.

        Raises as `masks` does."""
        if position - self._position <= _READ_AT_ONCE:
            return False
        self._guarded(lambda: self._read(tokens, self._position + _READ_AT_ONCE))
        return True

    def masks(self, tokens: list[int], position: int, drafts: list[int], bits: np.ndarray) -> RowMasks:
        """The masks of the sample at `position` and of those after each of `drafts`, written to `bits`. tokens: the answer's,
        at least up to `position`.

        Raises GrammarRefused, or BeginAgain, at most once for the same position.
        """
        found = RowMasks(bits)
        self._guarded(lambda: self._match(tokens, position, drafts, found))
        self._is_second_try = False
        return found

    def _guarded(self, follow: Callable[[], None]) -> None:
        try:
            follow()
        except Exception as error:
            is_beyond_limits = isinstance(error, _Exceeded)
            is_final = isinstance(error, GrammarRefused) or self._ending is None
            self._matcher = None
            if self._is_second_try or (is_final and not is_beyond_limits):
                raise
            if not is_beyond_limits:
                log.error("looking ahead failed: the answer is not brought to its end\n%s", where(error))
                self._limit = None
            self._is_second_try = True
            raise BeginAgain(is_beyond_limits=is_beyond_limits) from None

    def _read(self, answer: list[int], position: int) -> None:
        """Consume the answer's tokens up to `position`."""
        tokens = answer[self._position - self.first : position - self.first]
        assert len(tokens) == position - self._position, "the samples of earlier steps were read"
        assert self._matcher is not None, "the answer has begun"
        _consume(self._matcher, tokens)
        if self._ending is not None:
            self._ending.append(tokens, self._position)
        if self._unique is not None:
            self._unique.append(tokens)
        self._position = position

    def _match(self, answer: list[int], position: int, drafts: list[int], found: RowMasks) -> None:
        self._read(answer, position)
        matcher, ending, unique = self._matcher, self._ending, self._unique
        assert matcher is not None
        if drafts:  # on copies: llguidance's rollback leaves wrong masks (`closing_path`)
            matcher = matcher.deep_copy()
            ending = None if ending is None else ending.copy()
            unique = None if unique is None else unique.copy()
        for i in range(1 + len(drafts)):
            bits = found.bits[i]
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            _check(matcher)
            if unique is not None and bits.any():
                unique.narrow(bits, matcher)
                if not bits.any():
                    found.reasons[i] = _NO_OTHER_ITEM
            is_shortened = ending is not None and ending.narrow(bits, position + i)
            if unique is not None and ending is not None and _is_near_end(ending, position + i):
                is_shortened |= unique.lead_out(bits)
            if is_shortened:
                found.shortened.append(i)
            is_last = i == len(drafts) or (unique is not None and not _is_set(bits, drafts[i]))
            if is_last or matcher.is_stopped() or not matcher.try_consume_tokens([drafts[i]]):
                found.bits[i + 1 :] = 0
                break  # samples behind a draft that the grammar refuses are dropped
            if ending is not None:
                ending.append([drafts[i]], position + i)
            if unique is not None:
                unique.append([drafts[i]])
        if not drafts and len(forced := matcher.compute_ff_tokens()) > 1:
            forced = forced if unique is None else unique.distinct(forced)
            if len(forced) > 1:
                found.forced = forced[:_MAX_FORCED]
        _check(matcher)


def _consume(matcher: "LLMatcher", tokens: list[int]) -> None:
    """Raises GrammarRefused unless the matcher takes the tokens, or the grammar is complete."""
    if not tokens or matcher.is_stopped():
        return
    # A token sampled under a mask is accepted, so it is not tried first: that would take twice the time.
    is_taken = matcher.consume_token(tokens[0]) if len(tokens) == 1 else matcher.consume_tokens(tokens)
    if is_taken or (matcher.is_stopped() and not matcher.is_error()):
        return
    from llama_core.text.grammar_words import is_beyond_limits

    if matcher.is_error() and is_beyond_limits(matcher.get_error()):
        _check(matcher)
    raise GrammarRefused("the tokens generated so far do not follow the grammar")


def _is_near_end(ending: JsonEnding, position: int) -> bool:
    """Whether the answer must end within a few tokens, so that an item that equals an earlier one could not become another."""
    path = ending.place.path
    return ending.limit - position - len(path) < _NEAR if path else False


def _is_set(bits: np.ndarray, token: int) -> bool:
    return bool(bits[token // 32] >> np.uint32(token % 32) & 1)


def _check(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        from llama_core.text.grammar_words import lark_words
        from llama_core.text.schema_faults import schema_reason

        raise _Exceeded(f"the grammar cannot be followed: {lark_words(matcher.get_error(), schema_reason)}")
