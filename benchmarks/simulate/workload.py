"""What clients of a simulated fleet ask, and when."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.support.modelled_fleet import ANSWER

OF_ANSWER: Final = -1  # the name of a piece that an engine has generated
_FILL, _FIRST, _DIGITS, _BASE = [301], 302, 4, 256  # a piece's tokens: its name's digits, then the same one


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request. at_s: after the beginning, or after the end of the call whose `then` has it. prompt: pieces (name, tokens):
    equal names have equal tokens. then: calls that follow its end, such as the next turn of a session."""

    at_s: float
    prompt: Sequence[tuple[int, int]]
    output: int
    owner: str = ""
    then: "Sequence[Call]" = ()

    def tokens(self) -> list[int]:
        found: list[int] = []
        for name, count in self.prompt:
            if name == OF_ANSWER:
                found += [ANSWER] * count
            else:
                head = [_FIRST + name // _BASE**digit % _BASE for digit in range(_DIGITS)]
                found += (head + _FILL * (count - _DIGITS))[:count]
        return found

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer."""
        return sum(count for _, count in self.prompt) + self.output


def with_later(roots: Sequence[Call]) -> list[Call]:
    """And all calls that follow them."""
    found = list(roots)
    for call in found:
        found += call.then
    return found
