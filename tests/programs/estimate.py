"""Run as a program: the memory estimate beside the memory of rank processes with every cache block written.

    python -m tests.programs.estimate                                    the demo model in float32 on 2 ranks
    python -m tests.programs.estimate CKPT RANKS DTYPE QUANTIZATION MAX_SEQ_LEN ...     five words for each configuration

Each rank is a process. It imports what a rank needs, which is an empty rank; then it loads, and runs steps that write every
block of the cache, fill a step to its limit, and sample in every slot. The memory is its proportional set size (PSS) less that
of the empty rank, on a machine where only the ranks run: the ranks share the pages of libraries, and other processes that map
them do not count. Prints a table, and the same as one line of JSON.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.programs import REPOSITORY, environment

DEMO = ("demo", "2", "float32", "auto", "512")
NUM_SEQUENCES = 32


def pss_bytes(num_ranks: int) -> int:
    """The proportional set size of this process, with pages of files shared by `num_ranks` processes."""
    pss = _kilobytes("smaps_rollup")
    return (pss["Pss_Anon"] + pss["Pss_Shmem"] + _kilobytes("status")["RssFile"] // num_ranks) * 1024


def _kilobytes(file: str) -> dict[str, int]:
    lines = (Path("/proc/self") / file).read_text().splitlines()
    return {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}


def run_rank(rank: int, words: list[str], store_file: str) -> None:
    """One rank: prints its PSS when it is empty, waits for the others, loads, computes, and prints its PSS again."""
    import ray  # noqa: F401
    import torch
    from torch._C._distributed_c10d import FileStore

    import cluster.rank.rank_process
    import cluster.rank.runner_factory  # noqa: F401
    from llama_core.backends.parallel import alone, join
    from llama_core.backends.runner import ModelRunner

    num_ranks = int(words[1])
    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    config = configuration(words)
    _meet("imported")
    empty = pss_bytes(num_ranks)
    _meet("measured empty")
    parallel = alone("cpu") if num_ranks == 1 else join(rank, num_ranks, "cpu", FileStore(store_file, num_ranks))
    runner = ModelRunner.load(config, parallel)
    num_blocks = runner.max_num_blocks()
    runner.allocate_cache(num_blocks)
    runner.warm_up()
    write_every_block(runner, num_blocks)
    _meet("computed")
    used = pss_bytes(num_ranks)
    _meet("measured")
    print("SEEN", json.dumps({"empty": empty, "used": used, "blocks": num_blocks}), flush=True)


def write_every_block(runner: Any, num_blocks: int) -> None:
    """Prefill every slot to its full length in steps as large as allowed, and sample; then write the blocks that are left."""
    from llama_core.scheduling.sampling_params import SamplingParams
    from llama_core.scheduling.step import Row, SlotInit, StepInput

    config = runner.config
    size, slots = config.block_size, range(config.max_batch_size)
    left = list(range(num_blocks))
    while left:
        share = max(1, min(config.blocks_per_sequence, -(-len(left) // len(slots))))
        admit, lengths = [], []
        for slot in slots:
            blocks, left = left[:share], left[share:]
            if not blocks:
                break
            tokens = [1 + i % (config.vocab_size - 1) for i in range(min(len(blocks) * size, config.max_seq_len) - 1)]
            admit.append(SlotInit(slot, tokens, blocks, SamplingParams(temperature=0.8, top_p=0.9, seed=slot)))
            lengths.append(len(tokens))
        starts = [0] * len(admit)
        while any(start < length for start, length in zip(starts, lengths, strict=True)):
            room, rows = config.max_step_tokens, []
            for slot, length in enumerate(lengths):
                count = min(room, length - starts[slot])
                if count:
                    rows.append(Row(slot, starts[slot], count, starts[slot] + count == length))
                    starts[slot] += count
                    room -= count
            runner.step(StepInput(epoch=0, step=0, rows=rows, admit=admit))
            admit = []
        # The last position of each sequence, all in one step.
        runner.step(StepInput(epoch=0, step=0, rows=[Row(slot, n, 1, False) for slot, n in enumerate(lengths)]))


def configuration(words: list[str]) -> Any:
    from llama_core.backends.memory_estimate import describe_checkpoint
    from llama_core.config import EngineConfig

    path, _, dtype, quantization, length = words
    file, model, _ = describe_checkpoint(REPOSITORY / path)
    return EngineConfig(
        str(file),
        model.vocab_size,
        int(length),
        NUM_SEQUENCES,
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]
        quantization=quantization,
    )


def measure(words: list[str]) -> list[dict[str, Any]]:
    """One entry for each rank: estimated and measured bytes, and their ratio."""
    from llama_core.backends.memory_estimate import estimate_memory

    num_ranks = int(words[1])
    estimate = estimate_memory(configuration(words), num_ranks)
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.programs.estimate", "--rank"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        ranks = [
            subprocess.Popen(
                [*command, str(rank), f"{directory}/store", *words], cwd=REPOSITORY, env=environment(), **pipes
            )  # type: ignore[call-overload]
            for rank in range(num_ranks)
        ]
        try:
            seen = _conduct(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
    found = []
    for planned, measured in zip(estimate.ranks, seen, strict=True):
        bytes_used = measured["used"] - measured["empty"]
        parts = {"weights": planned.weights, "cache": planned.cache, "working": planned.working}
        found.append(
            {"configuration": " ".join(words), "rank": planned.rank, **parts, "estimated": planned.total}
            | {"measured": bytes_used, "ratio": planned.total / bytes_used}
        )
    return found


def _meet(where: str) -> None:
    """Wait until the parent has heard the same from every rank."""
    print(where, flush=True)
    assert sys.stdin.readline(), "the parent has ended"


def _conduct(ranks: list[Any]) -> list[dict[str, int]]:
    for where in ("imported", "measured empty", "computed", "measured"):
        for process in ranks:
            line = process.stdout.readline().strip()
            while line and line != where:
                line = process.stdout.readline().strip()
            assert line == where, f"a rank ended before it had {where}"
        for process in ranks:
            process.stdin.write("\n")
            process.stdin.flush()
    return [json.loads(process.stdout.readline().removeprefix("SEEN ")) for process in ranks]


def main(words: list[str]) -> None:
    if words[:1] == ["--rank"]:
        return run_rank(int(words[1]), words[3:], words[2])
    words = words or list(DEMO)
    found = [row for i in range(0, len(words), len(DEMO)) for row in measure(words[i : i + len(DEMO)])]
    print(f"{'configuration':70} rank   weights     cache   working estimated  measured  ratio")
    for row in found:
        columns = (row[name] / 1e6 for name in ("weights", "cache", "working", "estimated", "measured"))
        print(f"{row['configuration']:70} {row['rank']:4} {' '.join(f'{n:9.1f}' for n in columns)}  {row['ratio']:.3f}")
    print("SEEN", json.dumps({"ranks": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
