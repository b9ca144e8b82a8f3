"""What happens to a simulated fleet, drawn from a seed: requests, faults, and engines and fronts that come and go."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

LASTS_S: Final = 30.0
MOMENT_S: Final = 2.0  # long


@dataclass(frozen=True, slots=True)
class Event:
    """at_s: since the beginning. which, other: numbers that choose among what there is then, so that a history from which
    events are removed stays one. size: seconds, or tokens."""

    at_s: float
    kind: str
    which: int = 0
    other: int = 0
    size: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_s:6.2f} s {self.kind} {self.which} {self.other} {self.size:g}"


@dataclass(frozen=True, slots=True)
class Setting:
    """The cluster when its history begins. form: fleet, or build_app, where each front has ranks of its own. engines: of each,
    its application's number. window_s: how long a front keeps streams that nobody reads."""

    seed: int
    form: str
    num_fronts: int
    engines: tuple[int, ...]
    max_batch_size: int
    max_queue: int
    step_s: float
    max_loras: int = 1
    window_s: float = 5.0
    hold_timeout_s: float = 60.0

    @property
    def num_applications(self) -> int:
        return max(self.engines) + 1


def _silence_s(draw: random.Random) -> float:
    """Up to over CLOSE_AFTER_S; 0: it ends at the moment in which a front notices it."""
    return draw.choice((0.0, 0.0, 0.3, 1.4, 1.6, 3.0, 18.0))


def _until_next_s(draw: random.Random) -> float:
    """Until a new process starts in the place of one that has ended."""
    return draw.choice((0.1, 1.0, 5.0))


def _at_once(draw: random.Random) -> float:
    return 0.0


# Kind of a fault -> its size.
FAULTS: Final[dict[str, Callable[[random.Random], float]]] = {
    "kill": _until_next_s,
    "power": _until_next_s,
    "stop": _silence_s,
    "silence": _silence_s,
    "silence to": _silence_s,
    "silence from": _silence_s,
    "island": lambda draw: draw.choice((1.4, 3.0, 8.0)),  # a front that hears nobody
    "late": lambda draw: draw.choice((0.05, 0.4, 0.9)),
    "cut": _at_once,
    "rank": _at_once,
    "rank hangs": lambda draw: draw.choice((0.5, 3.0)),
    "slow ranks": lambda draw: draw.choice((1.0, 5.0)),
    "no new ranks": lambda draw: draw.choice((0.5, 4.0)),
    "fewer ranks": lambda draw: draw.choice((1.0, 10.0)),
    "update": lambda draw: draw.choice((0.0, 0.1, 2.0)),  # until each successor starts; 0: before
    "bad update": _at_once,
    "drain": _until_next_s,
    "join": _at_once,
    "pause of a front": lambda draw: draw.choice((0.4, 0.9, 1.6, 2.5, 5.0)),
    "end of a front": lambda draw: draw.choice((0.1, 2.0)),
    "power of a front": lambda draw: draw.choice((0.1, 2.0)),
    "drain of a front": _at_once,
    "adapter": _at_once,
    "no adapter": _at_once,
    "defaults": _at_once,
    "remove": lambda draw: draw.choice((3.0, 8.0, 30.0)),  # until the application is back
    "rival": _at_once,
    "head": lambda draw: draw.choice((2.0, 12.0)),
    "outage": lambda draw: draw.choice((1.0, 5.0)),  # of all engines of an application
    "limits": _at_once,
    "burst": lambda draw: draw.choice((5.0, 12.0, 30.0)),  # requests
    "burst of adapters": lambda draw: draw.choice((12.0, 30.0)),
    "leave": lambda draw: draw.choice((0.1, 1.0, 8.0)),  # until the client is back
}
# Faults that show more together: what one of them leaves behind, the others find.
THEMES: Final = (
    ("adapter", "no adapter", "update", "drain", "end of a front", "leave"),
    ("adapter", "no adapter", "update", "join"),
    ("adapter", "adapter", "burst"),
    ("adapter", "burst of adapters"),
    ("silence from", "silence from", "silence", "stop", "island"),
    ("burst", "island"),
    ("burst", "kill", "rank", "burst"),
    ("burst", "limits", "kill", "outage"),
    ("burst", "outage"),
    ("update", "bad update", "remove", "rival", "defaults"),
)
OF_BUILD_APP: Final = frozenset(
    (
        "rank",
        "rank hangs",
        "no new ranks",
        "slow ranks",
        "fewer ranks",
        "end of a front",
        "power of a front",
        "burst",
        "leave",
    )
)


def drawn(seed: int, form: str = "") -> tuple[Setting, list[Event]]:
    """form: a seed decides where it is empty."""
    draw = random.Random(seed)
    own = "build_app" if draw.random() < 0.15 else "fleet"
    num_applications = 1 if (form or own) == "build_app" else draw.choice((1, 1, 1, 2))
    setting = Setting(
        seed,
        form or own,
        num_fronts=draw.randint(1, 3),
        engines=tuple(number % num_applications for number in range(draw.choice((2, 2, 3, 4, 5, 6)))),
        max_batch_size=draw.randint(1, 4),
        max_queue=draw.choice((2, 8, 64)),
        step_s=draw.choice((0.02, 0.05, 0.2)),
        max_loras=draw.choice((1, 2)),
        window_s=draw.choice((0.0, 3.0)),
    )
    # Around which most happens, in some histories.
    moments = [draw.uniform(0.0, LASTS_S - MOMENT_S) for _ in range(draw.choice((0, 2, 4)))]
    events = [
        Event(_time(draw, moments), "request", draw.randrange(10**6), draw.randrange(1000), _num_tokens(draw))
        for _ in range(draw.randint(5, 40))
    ]
    events += [
        Event(_time(draw, moments), "cancel", draw.randrange(1000), 0, draw.randint(0, 20))
        for _ in range(draw.randint(0, 5))
    ]
    possible = [kind for kind in FAULTS if setting.form == "fleet" or kind in OF_BUILD_APP]
    kinds = draw.sample(possible, draw.randint(2, min(12, len(possible))))
    if setting.form == "fleet" and draw.random() < 0.5:
        kinds = [*draw.choice(THEMES)]
    if any("adapter" in kind for kind in kinds):  # each name has another one from the beginning
        shift = draw.randrange(3)
        events += [
            Event(0.0, "adapter", name + 3 * ((name + shift) % 3), number)
            for number in range(num_applications)
            for name in range(3)
        ]
    if "burst of adapters" in kinds:
        setting = replace(setting, max_loras=2, max_batch_size=4)
    for _ in range(draw.randint(10, 20)):
        kind = draw.choice(kinds)
        fault = Event(_time(draw, moments), kind, draw.randrange(1000), draw.randrange(1000), FAULTS[kind](draw))
        events.append(fault)
        if kind.startswith("silence") and not fault.size:  # with requests that are sent into it
            at = (fault.at_s + draw.uniform(0.1, 1.5) for _ in range(4))
            events += [Event(round(at_s, 3), "request", draw.randrange(10**6), fault.other, 30) for at_s in at]
    # All of it takes the half of what is left of the history, about.
    num_slots = setting.max_batch_size * (setting.num_fronts if setting.form == "build_app" else len(setting.engines))
    num_tokens = sum(
        event.size * (60 if event.kind.startswith("burst") else 2)
        for event in events
        if event.kind.startswith(("burst", "request"))
    )
    step_s = min(setting.step_s, 40.0 * num_slots / num_tokens)
    return replace(setting, step_s=round(step_s, 3)), sorted(events, key=lambda event: event.at_s)


def _num_tokens(draw: random.Random) -> int:
    return draw.choice((draw.randint(1, 60), draw.randint(1, 60), draw.randint(1, 150)))


def _time(draw: random.Random, moments: Sequence[float]) -> float:
    """Some at the same time as others."""
    at_s = draw.uniform(0.0, LASTS_S)
    if moments and draw.random() < 0.7:
        at_s = draw.choice(moments) + draw.uniform(0.0, MOMENT_S)
    return round(at_s) if draw.random() < 0.2 else round(at_s, 3)
