"""What clients of a simulated fleet ask: calls, their prompts in pieces, and traces of requests that others have published."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ANSWER: Final = 300  # the token that simulated ranks sample; no model's end of an answer
_FILL: Final = [301]
_DIGITS: Final = 4  # tokens that name a piece
_BASE: Final = 256
OF_ANSWER: Final = -1  # the name of a piece that an engine has generated


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request. at_s: after the beginning, or after the end of the call whose `then` has it. prompt: pieces (name, tokens):
    equal names have equal tokens. then: calls that follow its end, such as the next turn of a session."""

    at_s: float
    prompt: Sequence[tuple[int, int]]
    output: int
    owner: str = ""
    then: "Sequence[Call]" = ()
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt)

    def tokens(self) -> list[int]:
        found: list[int] = []
        for name, count in self.prompt:
            if name == OF_ANSWER:
                found += [ANSWER] * count
            else:
                head = [302 + name // _BASE**digit % _BASE for digit in range(_DIGITS)]
                found += (head + _FILL * (count - _DIGITS))[:count]
        return found


def all_calls(roots: Sequence[Call]) -> list[Call]:
    found = list(roots)
    for call in found:
        found += call.then
    return found
