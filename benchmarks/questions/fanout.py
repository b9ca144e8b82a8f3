"""The cost of a step beyond the forward pass: the round trip from the driver to two rank actors.

    python -m benchmarks fanout

Real actors, real sockets, the event loop of a Serve replica (uvloop), a decode step of 32 rows; the ranks' runner computes
nothing. Times are in milliseconds: until every rank has answered (`all_ranks_median_ms`), and for each step while two are in
flight (`pipelined_ms_per_step`).
"""

import asyncio
import logging
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import ray
import uvloop
from ray.util.placement_group import placement_group

from benchmarks.harness.common import REPOSITORY, emit, percentile, print_table
from benchmarks.harness.options import question_parser
from benchmarks.harness.paced import make_paced_runner
from cluster.driver.placement import group_bundles
from cluster.driver.rank_group import RankGroup
from llama_core.config import EngineConfig
from llama_core.scheduling.step import Grow, Row, StepInput

GOAL_MS = 0.15


def decode_step(step: int, num_rows: int) -> StepInput:
    """A decode step; one of 16 rows needs a new block, as with blocks of 16 tokens."""
    rows = [Row(slot, 500 + step, 1, True) for slot in range(num_rows)]
    return StepInput(0, step, rows, grow=[Grow(slot, 7) for slot in range(step % 16, num_rows, 16)])


async def measure(num_ranks: int, num_rows: int, num_steps: int) -> dict[str, Any]:
    """The figures, in milliseconds where their names say so."""
    placement = placement_group(group_bundles(num_ranks, "cpu"), strategy="STRICT_PACK")
    await asyncio.wait_for(placement.ready(), 60)
    config = EngineConfig(ckpt_dir="", vocab_size=32_000, max_seq_len=4096, max_batch_size=32, device="cpu")
    group = RankGroup(config, placement, runner_factory=make_paced_runner)
    info = await group.start()
    trips: list[float] = []
    for step in range(num_steps + 500):
        batch = decode_step(step, num_rows)
        began = time.perf_counter()
        await group.submit(batch)
        while group.num_in_flight:  # noqa: ASYNC110 (an event's cost would be measured too)
            await asyncio.sleep(0)
        trips.append((time.perf_counter() - began) * 1e3)
    del trips[:500]
    first = num_steps + 500
    began = time.perf_counter()
    previous = group.submit(decode_step(first, num_rows))
    for step in range(first + 1, first + num_steps):
        following = group.submit(decode_step(step, num_rows))
        await previous
        previous = following
    await previous
    pipelined = (time.perf_counter() - began) * 1e3 / num_steps
    await group.stop()
    return {
        "all_ranks_median_ms": statistics.median(trips),
        "all_ranks_p99_ms": percentile(trips, 99),
        "pipelined_ms_per_step": pipelined,
        "pinned_ranks": sum(bool(report.cores) for report in info.ranks),
    }


def main(argv: Sequence[str]) -> None:
    parser = question_parser("fanout", __doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = str(REPOSITORY)  # for the ranks' processes
    ray.init(
        address="local",
        num_cpus=options.ranks + 1,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    try:
        result = uvloop.run(measure(options.ranks, options.rows, options.steps))
    finally:
        ray.shutdown()
    rows = [(name.replace("_", " "), value) for name, value in result.items()]
    print_table(f"{options.rows} rows to {options.ranks} ranks and back, {options.steps} steps", ["figure", "ms"], rows)
    load = {"ranks": options.ranks, "rows": options.rows, "steps": options.steps}
    emit("fanout", load | result | {"goal_ms": GOAL_MS}, options)
