"""Reads published traces of requests, each in its own format."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulate.workload import Call


def mooncake(path: Path, block: int = 512, *, spreads: bool = False) -> list[Call]:
    """JSON lines with times in milliseconds, lengths and the hashes of prefixes of 512, 1024, ... tokens. block: tokens that
    each such block has here; lengths are scaled alike. spreads: the times are in steps of 3 s; spread requests evenly."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    times = [line["timestamp"] / 1e3 for line in lines]
    times = spread(times) if spreads else times
    calls = []
    for at_s, line in zip(times, lines, strict=True):
        left = max(1, line["input_length"] * block // 512)
        pieces = [(each, min(block, left - i * block)) for i, each in enumerate(line["hash_ids"]) if left > i * block]
        calls.append(Call(at_s, tuple(pieces), max(1, line["output_length"])))
    return calls


def spread(times: Sequence[float]) -> list[float]:
    """Those of equal times evenly over the time until the next one."""
    found: list[float] = []
    distinct = sorted(set(times))
    ends = dict(zip(distinct, [*distinct[1:], 2 * distinct[-1] - distinct[-2] if len(distinct) > 1 else 1.0], strict=True))
    counts = {each: times.count(each) for each in distinct}
    seen: dict[float, int] = {}
    for each in times:
        number = seen[each] = seen.get(each, -1) + 1
        found.append(each + (ends[each] - each) * number / counts[each])
    return found
