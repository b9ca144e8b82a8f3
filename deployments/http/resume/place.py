"""How much of a stream a client has, in tokens, and the event ids that say so: any replica can go on there.

    id     = place stamp
    place  = state | state ":" events | state "-" state ":" events
    state  = choice, joined by "."
    choice = its number of tokens, then "e" if it has ended
    stamp  = "~" seconds since 1970 "~" fingerprint, both in hexadecimal digits

"12" is the place of the last event of the delta that ends with the 12th token. Its earlier events, where it begins after the
9th, have "9-12:1", "9-12:2" and so on. "0:1" is the first event of several that open the stream; "12e:1" is the first after the
ends of all choices.
"""

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from hashlib import blake2b
from typing import Final, NamedTuple

from deployments.engine.interface import Engine
from deployments.openai.errors import AnswerChanged
from deployments.openai.plan import Plan
from llama_core.errors import InvalidParameter

EVENT_HEADER: Final = "Last-Event-ID"
_CHOICE: Final = "[0-9]{1,9}e?"
_STATE: Final = rf"{_CHOICE}(?:\.{_CHOICE})*"
# Ids of the former version have no stamp.
_STAMP: Final = "~([0-9a-f]{1,8})~([0-9a-f]{16})"
_ID = re.compile(rf"({_STATE})(?:(?:-({_STATE}))?:([0-9]{{1,9}}))?(?:{_STAMP})?")


class Place(NamedTuple):
    """state: by choice, as in an id. target: after the delta of which the client has some events. num_events: so many of that
    delta's events, or of those that follow `state` without a delta. fingerprint: None in ids of the former version."""

    state: Sequence[str]
    target: Sequence[str] | None = None
    num_events: int = 0
    fingerprint: str | None = None

    @property
    def reached(self) -> Sequence[str]:
        """The state that the fingerprint is of."""
        return self.target or self.state

    @property
    def is_opening(self) -> bool:
        return self.target is None and self.num_events > 0 and not any(map(until, self.state))

    @property
    def has_ended(self) -> bool:
        return all(each.endswith("e") for each in self.state)


def num_tokens(reached: str) -> int:
    return int(reached.removesuffix("e"))


def until(reached: str) -> int:
    """As the argument of `SequenceStream.take`: the end counts as a token."""
    return num_tokens(reached) + reached.endswith("e")


def has_tokens(reached: str) -> bool:
    return reached[0] != "0"


def began_s_of(text: str) -> int | None:
    """The time in the stamp of an id."""
    found = re.search(_STAMP, text)
    return found and int(found[1], 16)


def misplaced() -> InvalidParameter:
    return InvalidParameter.of(
        EVENT_HEADER, "not an event of this request's stream: send the last id that it had, and the same body"
    )


def place_of(text: str, plan: Plan) -> Place:
    """The place of an id. Raises InvalidParameter where the plan's stream cannot have it."""
    if (found := _ID.fullmatch(text)) is not None:
        place = Place(found[1].split("."), found[2] and found[2].split("."), int(found[3] or 0), found[5])
        if _is_possible(place, plan):
            return place
    raise misplaced()


def _is_possible(place: Place, plan: Plan) -> bool:
    state, target, n = place.state, place.target or place.state, plan.request.n
    limits = [params.max_tokens for params in plan.request.params for _ in range(n)]
    if not len(state) == len(target) == len(limits):
        return False
    if place.target is None:
        fits = not place.num_events or place.is_opening or place.has_ended
    else:
        changes = [(before, after) for before, after in zip(state, target, strict=True) if before != after]
        fits = len(changes) == 1 and all(
            until(after) > until(before) == num_tokens(before) for before, after in changes
        )
    # Choices that share a prompt's log-probabilities begin after the first of them.
    begins = not plan.shares_prompt_logprobs or all(
        until(state[index - index % n]) for index, each in enumerate(target) if until(each) and index % n
    )
    return fits and begins and all(num_tokens(each) <= limit for each, limit in zip(target, limits, strict=True))


HASH_BYTES = 8


def changed() -> AnswerChanged:
    return AnswerChanged.of(
        "Last-Event-ID",
        "the rest of that answer cannot be computed any more: weights, adapter, chat template, defaults or API"
        " key have changed; drop what you have of it, and send the request without Last-Event-ID",
    )


class Fingerprint:
    """What an answer is computed from, as a short hash in the ids of its events: a stream never goes on as another answer.
    began_s: the time that chat templates read, in seconds since 1970."""

    def __init__(self, began_s: int, digest: bytes, engine: Engine, plan: Plan) -> None:
        """digest: of the body and the API key. A parameter that has its default value changes nothing, so that fronts of
        another version agree."""
        base = blake2b(digest)
        base.update(repr((engine.adapter, sorted(plan.request.shown_tokens))).encode())
        for prompt, params in zip(plan.request.prompts, plan.request.params, strict=True):
            own = {each.name: value for each in fields(params) if (value := getattr(params, each.name)) != each.default}
            base.update(array("i", prompt).tobytes() + repr(own).encode("utf-8", "surrogatepass"))
        self.began_s, self._base = began_s, base.digest()

    def of(self, numerics: Iterable[str]) -> str:
        """numerics: of the engines that computed the tokens so far."""
        return blake2b(b"\0".join([self._base, *map(str.encode, sorted(numerics))]), digest_size=HASH_BYTES).hexdigest()

    def stamp(self, numerics: Iterable[str]) -> str:
        """The end of an event's id."""
        return f"~{self.began_s:x}~{self.of(numerics)}"
