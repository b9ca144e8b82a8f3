"""What happens to a simulated fleet, drawn from a seed: requests, faults, and engines and fronts that come and go."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LASTS_S: Final = 30.0


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
    """The fleet when its history begins. models: of each engine, its model's number."""

    seed: int
    num_fronts: int
    models: tuple[int, ...]
    max_batch_size: int
    max_queue: int
    step_s: float
    hold_timeout_s: float = 60.0


# Kind of a fault -> its size. Seconds last up to over CLOSE_AFTER_S.
FAULTS: Final[dict[str, Callable[[random.Random], float]]] = {
    "kill": lambda draw: draw.choice((0.1, 1.0, 5.0)),  # until a new engine starts
    "power": lambda draw: draw.choice((0.1, 1.0, 5.0)),
    "stop": lambda draw: draw.choice((0.3, 1.4, 1.6, 3.0, 18.0)),
    "silence": lambda draw: draw.choice((0.5, 1.4, 1.6, 3.0, 18.0)),
    "silence to": lambda draw: draw.choice((0.5, 1.4, 1.6, 3.0, 18.0)),
    "silence from": lambda draw: draw.choice((0.5, 1.4, 1.6, 3.0, 18.0)),
    "late": lambda draw: draw.choice((0.05, 0.4, 0.9)),
    "cut": lambda draw: 0.0,
    "rank": lambda draw: 0.0,
    "hand over": lambda draw: draw.choice((0.0, 0.1, 2.0)),  # until its successor starts; 0: before
    "join": lambda draw: 0.0,
    "pause of a front": lambda draw: draw.choice((0.4, 0.9, 1.6, 2.5, 5.0)),
    "end of a front": lambda draw: draw.choice((0.1, 2.0)),
    "drain of a front": lambda draw: 0.0,
}


def drawn(seed: int) -> tuple[Setting, list[Event]]:
    draw = random.Random(seed)
    num_models = draw.choice((1, 1, 2))
    models = tuple(number % num_models for number in range(draw.randint(2, 5)))
    setting = Setting(
        seed,
        num_fronts=draw.randint(1, 3),
        models=models if len(models) >= num_models else models * num_models,
        max_batch_size=draw.randint(1, 4),
        max_queue=draw.choice((2, 8, 64)),
        step_s=draw.choice((0.02, 0.1, 0.3)),
    )
    events = [
        Event(_time(draw), "request", draw.randrange(1000), draw.randrange(1000), draw.randint(1, 60))
        for _ in range(draw.randint(5, 40))
    ]
    events += [
        Event(_time(draw), "cancel", draw.randrange(1000), 0, draw.randint(0, 20)) for _ in range(draw.randint(0, 5))
    ]
    kinds = draw.sample(list(FAULTS), draw.randint(2, len(FAULTS)))
    for _ in range(draw.randint(5, 20)):
        kind = draw.choice(kinds)
        events.append(Event(_time(draw), kind, draw.randrange(1000), draw.randrange(1000), FAULTS[kind](draw)))
    return setting, sorted(events, key=lambda event: event.at_s)


def _time(draw: random.Random) -> float:
    """Some at the same moment as others."""
    at_s = draw.uniform(0.0, LASTS_S)
    return round(at_s) if draw.random() < 0.2 else round(at_s, 3)
