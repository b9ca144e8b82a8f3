"""How much of a stream a client has, in tokens, and the event ids that say so: any replica can go on there.

    id     = state | state ":" events | state "-" state ":" events
    state  = choice, joined by "."
    choice = its number of tokens, then "e" if it has ended

"12" is the id of the last event of the delta that ends with the 12th token. Its earlier events, where it begins after the 9th,
have "9-12:1", "9-12:2" and so on. "0:1" is the first event of several that open the stream; "12e:1" is the first after the ends
of all choices.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from deployments.openai.plan import Plan
from llama_core.errors import InvalidParameter

EVENT_HEADER: Final = "Last-Event-ID"
_CHOICE: Final = "[0-9]{1,9}e?"
_STATE: Final = rf"{_CHOICE}(?:\.{_CHOICE})*"
_ID = re.compile(rf"({_STATE})(?:(?:-({_STATE}))?:([0-9]{{1,9}}))?")


class Reached(NamedTuple):
    """Of one choice."""

    num_tokens: int = 0
    has_ended: bool = False

    @property
    def until(self) -> int:
        """As the argument of `TokenStream.take`."""
        return self.num_tokens + self.has_ended

    def __str__(self) -> str:
        return f"{self.num_tokens}e" if self.has_ended else str(self.num_tokens)


class Place(NamedTuple):
    """target: after the delta of which the client has some events. num_events: so many of that delta's events, or of those that
    follow `state` without a delta."""

    state: Sequence[Reached]
    target: Sequence[Reached] | None = None
    num_events: int = 0

    @property
    def is_opening(self) -> bool:
        return self.target is None and self.num_events > 0 and not any(each.until for each in self.state)

    @property
    def has_ended(self) -> bool:
        return all(each.has_ended for each in self.state)


def misplaced(why: str) -> InvalidParameter:
    message = f"{EVENT_HEADER}: not an event of this request: {why}; send the last id that this request's stream had"
    return InvalidParameter(message, param=EVENT_HEADER)


def place_of(text: str, plan: Plan) -> Place:
    """The place of an id. Raises InvalidParameter where the plan's stream cannot have it."""
    found = _ID.fullmatch(text)
    if found is None:
        raise misplaced("ids look like 12, 3.4e or 12-20:2")
    state, target = _state(found[1]), None if found[2] is None else _state(found[2])
    place = Place(state, target, int(found[3] or 0))
    request = plan.request
    for each in (state, target or state):
        if len(each) != request.num_choices:
            raise misplaced(f"the request has {request.num_choices} choices, and the id has {len(each)}")
        if any(one.num_tokens > request.params[index // request.n].max_tokens for index, one in enumerate(each)):
            raise misplaced("it counts more tokens than max_tokens")
    if target is not None:
        changed = [index for index, pair in enumerate(zip(state, target, strict=True)) if pair[0] != pair[1]]
        if len(changed) != 1 or state[changed[0]].has_ended or target[changed[0]].until <= state[changed[0]].until:
            raise misplaced("a delta has further tokens of one choice, or its end")
    elif place.num_events and not (place.is_opening or place.has_ended):
        raise misplaced("events without tokens open or end the stream")
    if plan.shares_prompt_logprobs:
        firsts = (state[index - index % request.n] for index in range(len(state)))
        if any(each.until and not first.until for each, first in zip(state, firsts, strict=True)):
            raise misplaced("the first choice of a prompt begins first")
    return place


def _state(text: str) -> list[Reached]:
    return [Reached(int(each.removesuffix("e")), each.endswith("e")) for each in text.split(".")]
