"""The cost of one `schedule` and one `commit`, by the number of decode rows and of waiting sequences.

    python -m benchmarks scheduler

There is no model: the step outputs are made before the clock runs. Two steps are in flight, as in the server. Every sequence
decodes tokens that do not repeat and needs a new block every 16 steps.
"""

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.harness.common import Spread, emit, percentile, print_table
from benchmarks.harness.options import question_parser
from llama_core.config import MAX_DRAFTS
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.prefix_cache import prefix_hash
from llama_core.scheduling.request import FinishReason
from llama_core.scheduling.request import Sequence as LlamaSequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepInput, StepOutput

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
VOCABULARY = 32_000
EOS = 2
GOAL_MS, GOAL_ROWS = 0.2, 64


def sequence(draw: random.Random, num_prompt: int, max_new: int, beginning: Sequence[int] = ()) -> LlamaSequence:
    prompt = [*beginning, *(draw.randrange(3, VOCABULARY) for _ in range(num_prompt - len(beginning)))]
    return LlamaSequence(prompt, SamplingParams(max_tokens=max_new), num_prompt + max_new)


def answer(batch: StepInput, draw: random.Random) -> StepOutput:
    return StepOutput(batch.epoch, batch.step, [draw.randrange(3, VOCABULARY) for _ in range(batch.num_samples)])


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside the context; the server collects between requests too."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
        scheduler.add(sequence(draw, PROMPT_TOKENS, max_new))
    decodes = False
    while not decodes:  # the first steps read the prompts
        batch = scheduler.schedule()
        assert batch is not None
        decodes = len(batch.rows) == num_rows and batch.num_tokens == num_rows
        scheduler.commit(answer(batch, draw))
    in_flight: deque[StepOutput] = deque()
    schedules: list[float] = []
    commits: list[float] = []
    with no_collection():
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


def best_of(repeats: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of `repeats` calls."""
    times = []
    with no_collection():
        for _ in range(repeats):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
    return min(times)


def block_costs(num_blocks: int = 4096) -> dict[str, float]:
    """Microseconds for a block: allocate and release it, hash it, register it too, and look it up, share and release it."""
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    draw = random.Random(1)
    tokens = [[draw.randrange(VOCABULARY) for _ in range(BLOCK_SIZE)] for _ in range(num_blocks)]

    def take_and_give_back() -> None:
        blocks = pool.try_allocate(num_blocks)
        assert blocks is not None
        pool.release(blocks)

    def make_keys() -> list[bytes]:
        keys = [b""]
        for of_block in tokens:
            keys.append(prefix_hash(keys[-1], of_block))
        return keys[1:]

    keys = make_keys()

    def name() -> None:
        blocks = pool.try_allocate(num_blocks)
        assert blocks is not None
        for block, key in zip(blocks, keys, strict=True):
            pool.prefixes.register(block, key)
        pool.release(blocks)

    def find_and_share() -> None:
        found = pool.prefixes.lookup(keys)
        assert len(found) == num_blocks and pool.try_allocate(0, shared=found) is not None
        pool.release(found)

    seconds = {"take_and_give_back": best_of(5, take_and_give_back), "make_key": best_of(5, make_keys)}
    seconds |= {"take_name_and_give_back": best_of(5, name), "find_share_and_give_back": best_of(5, find_and_share)}
    return {name: value / num_blocks * 1e6 for name, value in seconds.items()}


def admission_costs(num_prompt: int) -> dict[str, float]:
    """Microseconds of the step that admits a prompt of `num_prompt` tokens, by how much of it is in the cache."""
    draw = random.Random(2)
    first = sequence(draw, num_prompt, 4)
    costs: dict[str, float] = {}
    for name, beginning in (("nothing cached", []), ("all cached", first.prompt[:-1])):
        times = []
        for _ in range(5):
            config = SchedulerConfig(2, num_prompt + 2, frozenset({EOS}), max_drafts=MAX_DRAFTS)
            scheduler = Scheduler(config, BlockPool(4 * num_prompt // BLOCK_SIZE, BLOCK_SIZE))
            seen = LlamaSequence(first.prompt, first.params, first.max_length)
            scheduler.add(seen)
            batch = scheduler.schedule()
            assert batch is not None
            scheduler.commit(answer(batch, draw))
            scheduler.finish(seen, FinishReason.ABORT)
            scheduler.add(sequence(draw, num_prompt, 4, beginning))
            times.append(best_of(1, scheduler.schedule))
        costs[name] = min(times) * 1e6
    return costs


def main(argv: Sequence[str]) -> None:
    parser = question_parser("scheduler", __doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--waiting", type=int, nargs="+", default=[10, 1000, 10_000])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt whose admission is timed")
    options = parser.parse_args(argv)
    steps = [
        step_cost(num_rows, num_waiting, caching, options.steps)
        for caching in (True, False)
        for num_rows in options.rows
        for num_waiting in options.waiting
    ]
    print_table(
        f"One step of the scheduler, microseconds (medians of {options.steps})",
        ["rows", "waiting", "prefix caching", "schedule", "commit", "both", "both, p99"],
        [
            (
                str(case["rows"]),
                case["waiting"],
                "on" if case["prefix_caching"] else "off",
                case["schedule_us"],
                case["commit_us"],
                case["both_us"],
                case["both_p99_us"],
            )
            for case in steps
        ],
    )
    worst = max((case["both_us"].median for case in steps if case["rows"] == GOAL_ROWS), default=None)
    if worst is not None:
        verdict = "met" if worst < GOAL_MS * 1e3 else "MISSED"
        print(f"  goal: under {GOAL_MS} ms at {GOAL_ROWS} rows, however many wait: {worst / 1e3:.3f} ms, {verdict}")
    blocks = block_costs()
    print_table(
        "A block, microseconds", ["what", "each"], [(name.replace("_", " "), us) for name, us in blocks.items()]
    )
    admissions = admission_costs(options.prompt)
    print_table(f"Admitting {options.prompt} tokens, microseconds", ["prompt", "the step"], list(admissions.items()))
    emit("scheduler", {"steps": steps, "block_us": blocks, "admission_us": admissions}, options)
