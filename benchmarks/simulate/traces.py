"""Reads published traces of requests, each in its own format."""

import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Final

from benchmarks.simulate.workload import Call

TRACE_BLOCK: Final = 512  # tokens of a prefix that Mooncake's traces hash
_CHARACTERS: Final = 2048  # of a text, in the place of such a block

Line = tuple[float, list[int], int, int]  # seconds, names of the prompt's blocks, its tokens, the answer's


def read(path: Path, block: int = TRACE_BLOCK, *, spreads: bool = False) -> list[Call]:
    """The format is that of the first line. block: tokens in the place of TRACE_BLOCK ones: prompts are scaled alike. spreads:
    requests with the same time come evenly until the next time; Mooncake's are in steps of 3 s."""
    with path.open(newline="") as file:
        first = file.readline()
        file.seek(0)
        if first.startswith("{"):
            lines = (json.loads(line) for line in file)
            found = list(_mooncake(lines) if "hash_ids" in first else _aibrix(lines))
        elif "ContextTokens" in first or "Request tokens" in first:
            found = list(_table(csv.DictReader(file)))
        else:
            raise ValueError(f"{path}: none of the formats of Mooncake, AIBrix, Azure and BurstGPT")
    found.sort(key=lambda line: line[0])
    times = [line[0] - found[0][0] for line in found]
    calls = []
    for at_s, (_, names, length, output) in zip(spread(times) if spreads else times, found, strict=True):
        left = max(1, length * block // TRACE_BLOCK)
        names = names[: -(-left // block)]
        last = left - block * (len(names) - 1)
        calls.append(Call(at_s, [*((name, block) for name in names[:-1]), (names[-1], last)], max(1, output)))
    return calls


def _mooncake(lines: Iterator[Any]) -> Iterator[Line]:
    """https://github.com/kvcache-ai/Mooncake: hash_ids name the prefixes of 512, 1024, ... tokens."""
    for line in lines:
        yield line["timestamp"] / 1e3, line["hash_ids"], line["input_length"], line["output_length"]


def _aibrix(lines: Iterator[Any]) -> Iterator[Line]:
    """https://github.com/vllm-project/aibrix: with the prompts' texts, whose equal prefixes get equal names."""
    names: dict[str, int] = {}
    for line in lines:
        for each in line["requests"]:
            length, text = each["Prompt Length"], each["prompt"]
            ends = range(1, -(-length // TRACE_BLOCK) + 1)
            prefixes = [f"{text[: end * _CHARACTERS]} {end}" for end in ends]
            own = [names.setdefault(prefix, len(names)) for prefix in prefixes]
            yield line["timestamp"] / 1e3, own or [0], length, each["Output Length"]


def _table(rows: Iterator[dict[str, str]]) -> Iterator[Line]:
    """https://github.com/Azure/AzurePublicDataset (2023) and https://github.com/HPMLL/BurstGPT: lengths alone."""
    names = count()
    for row in rows:
        if "TIMESTAMP" in row:
            whole, _, part = row["TIMESTAMP"].partition(".")
            at_s = datetime.fromisoformat(whole).timestamp() + float(f"0.{part or 0}")
            length, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        else:
            at_s, length, output = float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"])
        if output:  # BurstGPT's others have failed
            yield at_s, [next(names) for _ in range(-(-length // TRACE_BLOCK) or 1)], length, output


def spread(times: Sequence[float]) -> list[float]:
    """times: in order."""
    counts, found = Counter(times), list[float]()
    distinct = list(counts)
    ends = dict(zip(distinct, [*distinct[1:], distinct[-1] + 1.0], strict=True))
    for at_s, number in counts.items():
        found += [at_s + (ends[at_s] - at_s) * i / number for i in range(number)]
    return found
