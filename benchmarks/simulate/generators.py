"""Workloads by chance, each from a seed. Every one has `rate` arrivals a second (sessions, groups) for `seconds`."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from random import Random
from typing import Final

from benchmarks.simulate.workload import OF_ANSWER, Call

Pieces = list[tuple[int, int]]
NAMES: Final = 1000  # of pieces of which there is one; below are those that requests share


def _times(draw: Random, rate: float, seconds: float) -> Iterator[float]:
    at_s = draw.expovariate(rate)
    while at_s < seconds:
        yield at_s
        at_s += draw.expovariate(rate)


def agents(draw: Random, rate: float, seconds: float) -> list[Call]:
    """Sessions of 3 to 12 turns. Each turn's prompt is all before it and what a tool has answered, after a pause. One turn in
    five asks three others at once beside the next one, with the same beginning."""
    names = count(NAMES)

    def turn(pause_s: float, history: Pieces, left: int) -> Call:
        prompt = [*history, (next(names), draw.randint(100, 1500))]
        output = draw.randint(30, 400)
        later: list[Call] = []
        if left:
            after = [*prompt, (OF_ANSWER, output)]
            later = [turn(draw.expovariate(1 / 4.0), after, left - 1)]
            if draw.random() < 0.2:
                later += [turn(0.0, after, 0) for _ in range(3)]
        return Call(pause_s, prompt, output, then=later)

    roots = _times(draw, rate, seconds)
    return [turn(at_s, [(draw.randrange(4), 2048)], draw.randint(2, 11)) for at_s in roots]


def groups(draw: Random, rate: float, seconds: float) -> list[Call]:
    """Groups of 16 equal prompts that come together, as for reinforcement learning."""
    found: list[Call] = []
    for name, at_s in enumerate(_times(draw, rate, seconds), NAMES):
        prompt = [(name, draw.randint(500, 4000))]
        found += [Call(at_s, prompt, draw.randint(100, 600)) for _ in range(16)]
    return found


def tenants(draw: Random, rate: float, seconds: float) -> list[Call]:
    """Chats of eight owners, and one owner's batch, half as many requests as those, which comes at a third of the time."""
    chats = [replace(call, owner=f"owner-{draw.randrange(8)}") for call in _chats(draw, _times(draw, rate, seconds))]
    at_s, first = seconds / 3, NAMES + len(chats)
    batch = [Call(at_s, [(0, 512), (first + i, draw.randint(200, 2000))], 300, "batch") for i in range(len(chats) // 2)]
    return sorted([*chats, *batch], key=lambda call: call.at_s)


def day(draw: Random, rate: float, seconds: float) -> list[Call]:
    """Chats whose rate follows a sine with one period, from a tenth of `rate` to `rate`, with bursts of ten times that."""
    times = []
    for at_s in _times(draw, 10 * rate, seconds):
        share = 0.55 - 0.45 * math.cos(2 * math.pi * at_s / seconds)
        is_burst = at_s % 300.0 < 5.0
        if draw.random() < (share if is_burst else share / 10):
            times.append(at_s)
    return list(_chats(draw, times))


def _chats(draw: Random, times: Iterator[float] | list[float]) -> Iterator[Call]:
    for name, at_s in enumerate(times, NAMES):
        prompt = [(draw.randrange(6), 1024), (name, int(draw.lognormvariate(6.0, 1.0)) + 1)]
        yield Call(at_s, prompt, min(1000, int(draw.lognormvariate(5.0, 0.8)) + 1))


def mixed(draw: Random, rate: float, seconds: float) -> list[Call]:
    """Seven in ten have one of 24 prefixes of 1,024 tokens, by Zipf's law with exponent 1.1, and 64 tokens of their own; the
    others have 100, 600 or 2,000 tokens of their own. All have 48 tokens out."""
    weights = [1 / rank**1.1 for rank in range(1, 25)]
    found = []
    for name, at_s in enumerate(_times(draw, rate, seconds), NAMES):
        shared = [(draw.choices(range(24), weights)[0], 1024), (name, 64)]
        prompt = shared if draw.random() < 0.7 else [(name, draw.choice((100, 600, 2000)))]
        found.append(Call(at_s, prompt, 48))
    return found


GENERATORS: Final[Mapping[str, Callable[[Random, float, float], list[Call]]]] = {
    "agents": agents,
    "day": day,
    "groups": groups,
    "mixed": mixed,
    "tenants": tenants,
}
