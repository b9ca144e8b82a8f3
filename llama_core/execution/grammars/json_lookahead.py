"""A grammar of JSON compiled for looking ahead, and what was found out by that."""

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llama_core.execution.grammars.closing_path import LimitsExceeded, Search
from llama_core.execution.grammars.json_vocabulary import JsonText, JsonVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

MARGIN: Final = 8  # tokens to spare behind a token that stands for others
MAX_OTHER: Final = 512  # tokens that are followed where the first path is too long
MAX_WATCHED: Final = 512  # positions before the limit at which masks may be narrowed
# Tokens of the closing path of a whole answer. Longer ones are left as they are, because looking ahead costs more.
_MAX_PATH: Final = 256
_MAX_KNOWN: Final = 128  # masks of which a grammar keeps what was found: 4 MB with 128,000 tokens
# In schemas: what may make one value longer than the schema's text.
_LONG_PARTS: Final = re.compile(r'"(?:minItems|minLength|minProperties)": ?\d\d|\{\d\d')
# In schemas: what together may give one value several kinds of strings, some of which only end at certain texts, and lists
# whose rules count items of one kind.
_ALTERNATIVES: Final = re.compile(r'"(?:anyOf|oneOf|contains|uniqueItems)"')
_LIMITED_STRINGS: Final = re.compile(r'"(?:const|enum|format|pattern|minLength|maxLength)"')
# In schemas: an enum with lists or objects, each of which may go on in another way behind the same string.
_NESTED_VALUES: Final = re.compile(r'"enum": ?\[(?:"(?:[^"\\]|\\.)*"|[^"\[\]{}])*[\[{]')

Place = tuple[bytes, tuple[int, ...], int]  # the outline before a mask, the closing path, and a hash of the mask


@dataclass(frozen=True, slots=True)
class KnownMask:
    """The tokens that were kept of a mask, for positions with the same mask and closing path.

    bits: the mask's bytes, which compare faster than an array. path: the closing path there. kept: the tokens of `bits` that
    are in time, None where all are. The result holds while `needed` to `most` tokens may follow: with fewer, other tokens may
    be late; with more, late tokens may be in time. most: None where no token was late.
    """

    bits: bytes
    path: list[int]
    kept: np.ndarray | None
    needed: int
    most: int | None

    def holds(self, bits: np.ndarray, path: list[int], most: int) -> bool:
        """Whether the same is kept of `bits` with `most` tokens left."""
        in_range = self.needed <= most and (self.most is None or most <= self.most)
        return in_range and path == self.path and bits.tobytes() == self.bits


class Lookahead:
    """A grammar compiled for looking ahead.

    It is compiled apart from the grammar that decides masks. Matchers copied from one another share llguidance's limits, and
    looking ahead alone may exceed these.

    begins_with_text: other text may come before the JSON. has_limited_strings: some strings may have only some texts.
    is_string_free: what may follow a string that is a value does not depend on its text. has_outlines: what may follow an
    answer depends on its outline alone. is_broken: the limits were exceeded, so later answers need the grammar compiled
    anew."""

    def __init__(
        self,
        compiled: "Callable[[], LLMatcher]",
        vocabulary: JsonVocabulary,
        description: str,
        *,
        begins_with_text: bool = False,
        is_schema: bool = False,
    ) -> None:
        """compiled: compiles the grammar. description: `text.grammar.json_description`. is_schema: all of an answer's text is
        JSON of one schema, which is the description."""
        self.compiled = compiled
        self.matcher = compiled()
        self.vocabulary = vocabulary
        self.begins_with_text = begins_with_text
        self.is_broken = False
        self.has_limited_strings = bool(_LIMITED_STRINGS.search(description))
        self.is_string_free = _is_string_free(description)
        self.has_outlines = is_schema and self.is_string_free and not begins_with_text
        self._known: OrderedDict[Place, KnownMask] = OrderedDict()
        # Schemas also name the keys that are not required, and the type of every value.
        longest = vocabulary.num_tokens(description, MAX_WATCHED) + 8 * MARGIN
        if begins_with_text:
            longest = longest if all(mask.any() for mask in vocabulary.in_text) else 0
        else:
            path = self._shortest_answer()
            longest = max(longest, 2 * len(path) + 8 * MARGIN) if path else 0
        if longest and _LONG_PARTS.search(description):
            longest = MAX_WATCHED
        self.num_watched = min(longest, MAX_WATCHED)  # 0: answers are not brought to their end

    def known(self, place: Place) -> KnownMask | None:
        if (found := self._known.get(place)) is not None:
            self._known.move_to_end(place)
        return found

    def keep(self, place: Place, mask: KnownMask) -> None:
        self._known[place] = mask
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _shortest_answer(self) -> list[int]:
        try:
            return Search(self.vocabulary, _MAX_PATH, MAX_OTHER).path(self.matcher, JsonText())
        except LimitsExceeded:
            return []


def _is_string_free(description: str) -> bool:
    has_alternatives = _ALTERNATIVES.search(description) and _LIMITED_STRINGS.search(description)
    return not has_alternatives and not _NESTED_VALUES.search(description)
