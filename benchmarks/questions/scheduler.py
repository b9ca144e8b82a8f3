"""The cost of one `schedule` and one `commit`, by the number of decode rows and of waiting sequences.

    python -m benchmarks scheduler

There is no model: the step outputs are made before the clock runs. Two steps are in flight, as in the server. Every sequence
decodes tokens that do not repeat and needs a new block every 16 steps.
"""

import gc
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.common import Spread, emit, percentile, print_table
from benchmarks.harness.options import question_parser
from llama_core.config import MAX_DRAFTS
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence as LlamaSequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepInput, StepOutput

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
VOCABULARY = 32_000
EOS = 2
GOAL_US, GOAL_ROWS = 200.0, 64  # of both, however many wait


def answer(batch: StepInput, draw: random.Random) -> StepOutput:
    return StepOutput(batch.epoch, batch.step, [draw.randrange(3, VOCABULARY) for _ in range(batch.num_samples)])


def step_cost(num_rows: int, num_waiting: int, prefix_caching: bool, num_steps: int) -> dict[str, Any]:
    """Microseconds of `schedule`, of `commit`, and of both."""
    draw = random.Random(num_rows)
    max_new = num_steps + num_rows + 8  # the first sequences decode while the prompts of the others are read
    blocks_each = -(-(PROMPT_TOKENS + max_new) // BLOCK_SIZE)
    scheduler = Scheduler(
        SchedulerConfig(
            max_batch_size=num_rows,
            max_step_tokens=max(512, num_rows),
            stop_ids=frozenset({EOS}),
            max_drafts=MAX_DRAFTS,
            prefix_caching=prefix_caching,
        ),
        BlockPool(2 * num_rows * blocks_each, BLOCK_SIZE),
    )
    for _ in range(num_rows + num_waiting):
        prompt = [draw.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)]
        scheduler.add(LlamaSequence(prompt, SamplingParams(max_tokens=max_new), PROMPT_TOKENS + max_new))
    decodes = False
    while not decodes:  # the first steps read the prompts
        batch = scheduler.schedule()
        assert batch is not None
        decodes = len(batch.rows) == num_rows and batch.num_tokens == num_rows
        scheduler.commit(answer(batch, draw))
    in_flight: deque[StepOutput] = deque()
    schedules: list[float] = []
    commits: list[float] = []
    gc.collect()
    gc.disable()  # the server collects between requests too
    try:
        for _ in range(num_steps):
            begin = time.perf_counter()
            batch = scheduler.schedule()
            schedules.append((time.perf_counter() - begin) * 1e6)
            assert batch is not None and len(batch.rows) == num_rows
            in_flight.append(answer(batch, draw))
            if len(in_flight) == 2:
                output = in_flight.popleft()
                begin = time.perf_counter()
                scheduler.commit(output)
                commits.append((time.perf_counter() - begin) * 1e6)
    finally:
        gc.enable()
    both = [schedule + commit for schedule, commit in zip(schedules[1:], commits, strict=True)]
    return {
        "rows": num_rows,
        "waiting": num_waiting,
        "prefix_caching": prefix_caching,
        "schedule_us": Spread.of(schedules),
        "commit_us": Spread.of(commits),
        "both_us": Spread.of(both),
        "both_p99_us": percentile(both, 99),
    }


def main(argv: Sequence[str]) -> None:
    parser = question_parser("scheduler", __doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--waiting", type=int, nargs="+", default=[10, 1000, 10_000])
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(argv)
    steps = [
        step_cost(num_rows, num_waiting, caching, options.steps)
        for caching in (True, False)
        for num_rows in options.rows
        for num_waiting in options.waiting
    ]
    figures = ("waiting", "prefix_caching", "schedule_us", "commit_us", "both_us", "both_p99_us")
    print_table(
        f"One step of the scheduler, microseconds (medians of {options.steps})",
        ["rows", *(figure.removesuffix("_us").replace("_", " ") for figure in figures)],
        [(str(case["rows"]), *(case[figure] for figure in figures)) for case in steps],
    )
    emit("scheduler", {"steps": steps, "goal_us": GOAL_US, "goal_rows": GOAL_ROWS}, options)
