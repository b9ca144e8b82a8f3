"""Answers sampled from the masks of a grammar, which `JsonEnding` narrows, with the demo model's tokenizer."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from llama_core.execution.grammars.json_ending import JsonEnding
from llama_core.execution.grammars.json_lookahead import Lookahead
from llama_core.execution.grammars.json_vocabulary import JsonVocabulary, tokens_of
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.grammar import (
    begins_with_text,
    checked_grammar,
    is_of_schema,
    json_description,
    json_schema_grammar,
    limits,
)
from llama_core.text.grammar_vocabulary import grammar_vocabulary
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizer import Tokenizer
from llama_core.text.tools.pieces import joined
from llama_core.text.tools.tool import ToolUse
from tests.support.full_runs import examples

TOKENIZER: Final = load_tokenizer(Path(__file__).parents[2] / "demo" / "tokenizer.model")
NUM_WORDS: Final = -(-TOKENIZER.n_words // 32)  # of a mask
SEEDS: Final = examples(5, 12)  # of random answers

STORY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"story": {"type": "string"}},
    "required": ["story"],
    "additionalProperties": False,
}
BIG: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {f"key_number_{i}": {"type": "integer"} for i in range(12)},
    "required": [f"key_number_{i}" for i in range(12)],
}
RED_OR_BLUE: Final[dict[str, Any]] = {"type": "array", "items": {"enum": ["red", "blue"]}}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's vocabulary as llguidance reads it, and as `JsonEnding` does."""

    tokenizer: LLTokenizer
    json: JsonVocabulary

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        vocabulary = grammar_vocabulary(tokenizer, tokenizer.stop_ids)
        return cls(vocabulary, JsonVocabulary(vocabulary, NUM_WORDS))

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.tokenize_str(text)
        return found

    def text(self, token: int) -> bytes:
        return self.json.text(token)

    def matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits())


VOCABULARY: Final = Vocabulary.of(TOKENIZER)


class Respelled:
    """The demo model's tokenizer with other texts of some tokens, as larger vocabularies have them."""

    TEXTS: ClassVar = {
        **{900: b"\\u", 901: b'>{"', 902: b'":', 903: b'":{"', 904: b'"description', 905: b'"big'},
        **{910 + i: f'"{chr(99 + i)}name'.encode() for i in range(20)},
        **{930 + i: char.encode() + b'",' for i, char in enumerate(".!?:;)]}>-_ ")},
        **{950: b'",', 951: b'","', 952: b"{}", 953: b'""'},
    }

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def token_bytes(self, token: int) -> bytes:
        return self.TEXTS.get(token) or TOKENIZER.token_bytes(token)


RESPELLED: Final = cast(Tokenizer, Respelled())


@cache
def respelled() -> Vocabulary:
    return Vocabulary.of(RESPELLED)


def grammar_of(schema: Any) -> str:
    return checked_grammar(json_schema_grammar(schema), "g")


def lookahead_of(grammar: str, vocabulary: Vocabulary = VOCABULARY) -> Lookahead:
    return Lookahead(
        partial(vocabulary.matcher, grammar),
        vocabulary.json,
        json_description(grammar),
        begins_with_text=begins_with_text(grammar),
        is_schema=is_of_schema(grammar),
    )


def ending_of(grammar: str, limit: int) -> JsonEnding:
    return JsonEnding.of(lookahead_of(grammar), 0, limit)


# Chooses a token of those that a mask allows.
Choose = Callable[[list[int]], int]


def by_chance(seed: int, *preferred: bytes, vocabulary: Vocabulary = VOCABULARY) -> Choose:
    """A token whose text is preferred, if one is allowed; else any."""
    draw = random.Random(seed)

    def choose(allowed: list[int]) -> int:
        first = [token for token in allowed if vocabulary.text(token) in preferred]
        return draw.choice(first or allowed)

    return choose


def after(text: str, choose: Choose) -> Choose:
    """The tokens of `text` first, each of which must be allowed."""
    return behind(VOCABULARY.tokens(text), choose)


def behind(begin: list[int], choose: Choose) -> Choose:
    """These tokens first, each of which must be allowed."""
    tokens = iter(begin)

    def choose_next(allowed: list[int]) -> int:
        token = next(tokens, None)
        assert token is None or token in allowed, f"token {token} is not allowed"
        return choose(allowed) if token is None else token

    return choose_next


def sampled(
    grammar: str,
    limit: int,
    choose: Choose,
    ahead: Lookahead | None = None,
    vocabulary: Vocabulary = VOCABULARY,
    num_watched: int | None = None,
) -> tuple[list[int], bool, bool]:
    """The chosen tokens; whether the answer ended, and whether a text was lost.

    ahead: of the grammar, shared by answers. num_watched: positions before the limit; None for as many as the grammar asks for.
    """
    matcher, bits = vocabulary.matcher(grammar), np.zeros(NUM_WORDS, np.uint32)
    ending = JsonEnding.of(ahead or lookahead_of(grammar, vocabulary), 0, limit)
    if num_watched is not None:
        ending.first_watched = limit - num_watched
    tokens: list[int] = []
    is_shortened = False
    for position in range(limit):
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        is_shortened |= ending.narrow(bits, position)
        token = choose(tokens_of(bits))
        if token in TOKENIZER.stop_ids:
            return tokens, True, is_shortened
        assert matcher.try_consume_tokens([token]) == 1
        tokens.append(token)
        ending.append([token], position)
    return tokens, False, is_shortened


def pieces_of(answers: AnswerFormat, use: ToolUse | None, tokens: list[int]) -> list[Any]:
    """Calls of tools, arguments and texts, as a client gets them."""
    reader = answers.reader(use, begun=False)
    return joined([*reader.push(TOKENIZER.decode(tokens)), *reader.finish()])
