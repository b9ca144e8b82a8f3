"""Compiles grammars for rank 0, and makes matchers that have taken the tokens of an answer, in a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from llama_core.grammar.shared_cache import SharedCache

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT_GRAMMARS: Final = 16  # compiled grammars that later answers of their scope copy; most take up to 3 MB
_READ_AT_ONCE: Final = 16  # tokens: llguidance holds Python's interpreter lock while a matcher takes them


class GrammarRefused(Exception):
    """The answer's next token cannot be decided; the message says why."""


class MatcherFailed(GrammarRefused):
    """A matcher has exceeded llguidance's limits, which it shares with all copies of its grammar, or fits no text."""


class Matchers:
    """The vocabulary, and the grammars that were used last, by scope (`SlotInit.cache_scope`)."""

    def __init__(self, vocabulary: "Callable[[], LLTokenizer] | None") -> None:
        """vocabulary: called once, by `prepare` or for the first grammar; None: every grammar is refused."""
        self._load = vocabulary
        self._vocabulary: LLTokenizer | None = None  # of the thread
        self._kept: SharedCache[LLMatcher] = SharedCache(_KEPT_GRAMMARS)
        self._refused: SharedCache[str] = SharedCache(_KEPT_GRAMMARS)  # reasons, so that no row compiles in vain again
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")

    def prepare(self) -> None:
        """Load the vocabulary in the background."""
        self._thread.submit(self._loaded)

    def begin(self, scope: str, grammar: str, tokens: list[int], *, is_alone: bool = False) -> "Future[LLMatcher]":
        """A matcher that has taken the tokens. is_alone: it shares its limits with no other. Raises GrammarRefused, as the
        future does."""
        kept = None if is_alone else self._kept.find(scope, grammar)
        if kept is None or len(tokens) > _READ_AT_ONCE:
            return self._thread.submit(self._begun, scope, grammar, tokens, is_alone)
        done: Future[LLMatcher] = Future()
        done.set_result(_after(kept, tokens))
        return done

    def refuse(self, scope: str, grammar: str, reason: str) -> None:
        """No later answer of the scope begins with this grammar, until others have displaced the reason."""
        self._refused.keep(scope, grammar, reason, 1)

    def drop(self, scope: str, grammar: str) -> None:
        """Compile the grammar again for the next answer."""
        self._kept.drop(scope, grammar)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begun(self, scope: str, grammar: str, tokens: list[int], is_alone: bool) -> "LLMatcher":
        if (refused := self._refused.find(scope, grammar)) is not None:
            raise GrammarRefused(refused)
        compiled = None if is_alone else self._kept.find(scope, grammar)
        if compiled is None:
            try:
                compiled = self._compiled(grammar)
            except MatcherFailed as failed:  # no other answer has used its limits
                self.refuse(scope, grammar, str(failed))
                raise GrammarRefused(str(failed)) from None
            if not is_alone:
                self._kept.keep(scope, grammar, compiled, 1)
        return _after(compiled, tokens)

    def _compiled(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher  # loaded by the first grammar

        from llama_core.grammar.check import in_background, limits

        vocabulary = self._loaded()

        def compile_it() -> tuple[LLMatcher, LLMatcher]:
            made = LLMatcher(vocabulary, grammar, log_level=0, limits=limits(is_followed=True))
            first = made.deep_copy()
            first.compute_bitmask()  # the first mask may take 0.2 s
            return made, first

        compiled, first = in_background(compile_it)
        check(compiled)
        check(first)
        return compiled

    def _loaded(self) -> "LLTokenizer":
        if self._load is None:
            raise GrammarRefused("this engine has no tokenizer, so that it cannot follow grammars")
        if self._vocabulary is None:
            self._vocabulary = self._load()
        return self._vocabulary


def _after(compiled: "LLMatcher", tokens: list[int]) -> "LLMatcher":
    matcher = compiled.deep_copy()
    for begin in range(0, len(tokens), _READ_AT_ONCE):
        take(matcher, tokens[begin : begin + _READ_AT_ONCE])
    return matcher


def take(matcher: "LLMatcher", tokens: list[int]) -> None:
    """Raises MatcherFailed unless the matcher takes the tokens, or the grammar is complete."""
    if not tokens or matcher.is_stopped():
        check(matcher)
        return
    # A token sampled under a mask is accepted, so it is not tried first: that would take twice the time.
    if len(tokens) == 1:
        matcher.consume_token(tokens[0])
    else:
        matcher.consume_tokens(tokens)
    check(matcher)


def check(matcher: "LLMatcher") -> None:
    """Raises MatcherFailed where the matcher is in an error state."""
    if matcher.is_error():
        from llama_core.grammar.check import reason

        raise MatcherFailed(f"the grammar cannot be followed: {reason(matcher.get_error())}")
