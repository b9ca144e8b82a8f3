"""GB/s at which one rank reads its weights from the page cache, beside plain reads of the same files and a library.

    python -m benchmarks loading --ckpt DIRECTORY                  all weights, as one rank loads them
    python -m benchmarks loading --ckpt DIRECTORY --ranks 2        rank 0 of 2: its part, in GB/s of that part

read: every file into one buffer, as `cat` does. cpu: weights of a CPU rank, checked for values that are not finite. gpu_host:
what the host of a GPU rank does, slices to page-locked buffers, with a device that takes no time. mapped: the same by copies
from mapped files instead of reads. safetensors: the library's
tensors copied to weights that are allocated, as servers do. Every case runs in a process of its own, in alternating rounds,
after the files have been read once.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.common import REPOSITORY, Spread, emit, last_json, print_table, wait_quiet
from benchmarks.harness.options import model_name, question_parser
from llama_core.checkpoint.loader import rank_weights
from llama_core.checkpoint.rank_share import RankShare
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.checkpoint.source import CheckpointSource
from llama_core.checkpoint.uploads import BUFFER_BYTES, Uploads
from llama_core.checkpoint.weights import weight_specs
from llama_core.text.registry import load_tokenizer

GB = 1e9


class NoTransfers:
    """Page-locked buffers of plain memory, and a device that has every copy at once."""

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> None:
        pass

    def record(self) -> "NoTransfers":
        return self

    def wait(self) -> None:
        pass


def weight_files(source: CheckpointSource) -> list[Path]:
    return [file for file in source.files if file not in source.metadata_files and file.is_file()]


def read(source: CheckpointSource, vocab_size: int, ranks: int) -> int:
    buffer = bytearray(BUFFER_BYTES)
    total = 0
    for path in weight_files(source):
        with path.open("rb", buffering=0) as file:
            while num_bytes := file.readinto(buffer):
                total += num_bytes
    return total


def cpu(source: CheckpointSource, vocab_size: int, ranks: int) -> int:
    model = source.model_config(vocab_size)
    reader = source.open_weights(model)
    weights = dict(rank_weights(reader, model, RankShare.of(model, 0, ranks), reader.dtype, torch.device("cpu")))
    return sum(weight.nbytes for weight in weights.values())


def gpu_host(source: CheckpointSource, vocab_size: int, ranks: int, *, from_maps: bool = False) -> int:
    model = source.model_config(vocab_size)
    reader = source.open_weights(model)
    share, total = RankShare.of(model, 0, ranks), 0
    target = torch.empty(0, device="meta")
    with Uploads(torch.device("cuda"), NoTransfers()) as uploads:
        for name, spec in weight_specs(model).items():
            for piece in reader.slices(name, spec.part(share)):
                uploads.copy(target, piece._replace(offset=None) if from_maps else piece)
                total += piece.values.nbytes
            uploads.flush()
    return total


def mapped(source: CheckpointSource, vocab_size: int, ranks: int) -> int:
    return gpu_host(source, vocab_size, ranks, from_maps=True)


def safetensors(source: CheckpointSource, vocab_size: int, ranks: int) -> int:
    from safetensors import safe_open

    weights = []
    for path in weight_files(source):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, not a dict
                stored = file.get_tensor(name)
                weights.append(torch.empty_like(stored).copy_(stored))
    return sum(weight.nbytes for weight in weights)


CASES: dict[str, Callable[[CheckpointSource, int, int], int]] = {
    each.__name__: each for each in (read, cpu, gpu_host, mapped, safetensors)
}


def measure(case: str, ckpt: Path, vocab_size: int, ranks: int) -> dict[str, float]:
    """Load once in this process: GB/s of what was loaded, and processor seconds for a GB."""
    source = open_checkpoint(ckpt)
    began, cpu_began = time.perf_counter(), time.process_time()
    num_gb = CASES[case](source, vocab_size, ranks) / GB
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return {"gb": num_gb, "gb_s": num_gb / seconds, "cpu_s_per_gb": cpu_s / num_gb}


def in_process_of_its_own(case: str, ckpt: Path, vocab_size: int, ranks: int) -> dict[str, float]:
    code = (
        "import json, pathlib; from benchmarks.questions.loading import measure;"
        f"print(json.dumps(measure({case!r}, pathlib.Path({os.fspath(ckpt)!r}), {vocab_size}, {ranks})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return last_json(done.stdout)


def main(argv: Sequence[str]) -> None:
    parser = question_parser("loading", __doc__)
    parser.add_argument("--ckpt", type=Path, default=REPOSITORY / "demo", help="a checkpoint of any format")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.model in the checkpoint's directory if absent")
    parser.add_argument("--ranks", type=int, default=1, help="rank 0 of this number of ranks loads its part")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    ckpt = options.ckpt.absolute()
    source = open_checkpoint(ckpt)
    vocab_size = load_tokenizer(options.tokenizer or ckpt / "tokenizer.model").n_words
    is_safetensors = all(path.suffix == ".safetensors" for path in weight_files(source))
    cases = [case for case in CASES if case != "safetensors" or is_safetensors]
    read(source, vocab_size, 1)
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(options.rounds):
        wait_quiet()
        for case in cases if number % 2 == 0 else cases[::-1]:
            found[case].append(in_process_of_its_own(case, ckpt, vocab_size, options.ranks))
    figures: dict[str, dict[str, Any]] = {}
    for case, turns in found.items():
        ratios = [one["gb_s"] / other["gb_s"] for one, other in zip(turns, found["read"], strict=True)]
        spreads = {name: Spread.of(turn[name] for turn in turns) for name in ("gb_s", "cpu_s_per_gb")}
        figures[case] = {"gb": turns[0]["gb"], **spreads, "of_read": Spread.of(ratios)}
    print_table(
        f"{model_name(options)}, rank 0 of {options.ranks}",
        ["case", "GB", "GB/s", "of read", "cpu s/GB"],
        [(case, one["gb"], one["gb_s"], one["of_read"], one["cpu_s_per_gb"]) for case, one in figures.items()],
    )
    emit("loading", {"model": model_name(options), "ranks": options.ranks, "cases": figures}, options)
