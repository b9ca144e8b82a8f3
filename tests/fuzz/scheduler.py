"""Random operations on a scheduler; all rules are checked after each."""

from collections.abc import Callable
from random import Random
from typing import Any, get_args

from llama_core.scheduling.request import FinishReason
from llama_core.scheduling.sampling_params import Pooling
from tests.fuzz.outcome import Outcome
from tests.fuzz.scheduler_rules import ADAPTERS, MAX_LENGTH, OWNERS, PREFIXES, Bench, World

OPERATIONS_A_WORLD = 400


def run(cases: int, seed: int) -> Outcome:
    """`cases` operations. A finding names the seed that reproduces it."""
    outcome = Outcome("scheduler")
    number, sequences = 0, 0
    preemptions = hits = drafts = accepted = deferrals = 0
    while outcome.cases < cases:
        world_seed = seed * 1_000_003 + number
        number += 1
        bench, done = _in_one_world(world_seed, min(OPERATIONS_A_WORLD, cases - outcome.cases), outcome)
        sequences += bench.num_ended
        scheduler = bench.scheduler
        preemptions, hits = preemptions + scheduler.num_preemptions, hits + scheduler.num_prefix_hits
        deferrals += bench.num_deferrals
        drafts, accepted = drafts + scheduler.speculation.num_drafts, accepted + scheduler.speculation.num_accepted
        if done is not None:
            outcome.found(f"world {world_seed}: {done}")
    outcome.extra = {
        "worlds": number, "sequences": sequences, "preemptions": preemptions, "prefix_hit_tokens": hits,
        "draft_tokens": drafts, "draft_tokens_accepted": accepted, "deferrals": deferrals,
    }  # fmt: skip
    return outcome


def _in_one_world(seed: int, operations: int, outcome: Outcome) -> tuple[Bench, str | None]:
    draw = Random(seed)
    bench = Bench(World.random(draw))
    names, weights = list(OPERATIONS), [weight for _, weight in OPERATIONS.values()]
    for index in range(operations):
        operation = draw.choices(names, weights)[0]
        outcome.case(operation)
        try:
            OPERATIONS[operation][0](bench, draw)
            bench.check()
        except Exception as error:
            return bench, f"operation {index} ({operation}): {type(error).__name__}: {error}"
    try:
        bench.drain()
    except Exception as error:
        return bench, f"at the end: {type(error).__name__}: {error}"
    return bench, None


def _add(bench: Bench, draw: Random) -> None:
    bench.add(
        draw.randrange(len(PREFIXES)),
        [draw.randint(3, 6) for _ in range(draw.randint(1, 9))],
        draw.randint(0, 20),
        n=draw.choice((1, 1, 1, 2, 4)),
        owner=draw.choice(OWNERS),
        priority=draw.choice(bench.world.priorities),
        ignore_eos=draw.random() < 0.5,
        prompt_logprobs=draw.random() < 0.2,
        seed=draw.randint(0, 2),
        oracle=draw.random() < 0.5,
        has_grammar=draw.random() < 0.4,
        adapter=draw.choice(("", "", "", *ADAPTERS)),
        pooling=draw.choice(get_args(Pooling)) if draw.random() < 0.2 else "",
    )


def _abort(bench: Bench, draw: Random) -> None:
    if bench.heard:
        bench.finish(draw.choice(list(bench.heard)), draw.choice((FinishReason.ABORT, FinishReason.ERROR)))


def _step(bench: Bench, draw: Random) -> None:
    """One round of the engine loop."""
    while bench.schedule():
        pass
    bench.commit(sends_first=True)


def _fail(bench: Bench, draw: Random) -> None:
    num_blocks = draw.randint(-(-MAX_LENGTH // 4), 20) if draw.random() < 0.3 else None
    bench.fail(unsent=draw.random() < 0.3, raises=draw.random() < 0.5, num_blocks=num_blocks)


OPERATIONS: dict[str, tuple[Callable[[Bench, Random], Any], float]] = {
    "add": (_add, 20),
    "abort": (_abort, 4),
    "schedule": (lambda bench, draw: bench.schedule(), 20),
    "commit": (lambda bench, draw: bench.commit(), 16),
    "step": (_step, 30),
    "stop string": (lambda bench, draw: bench.commit(stops=True, sends_first=draw.random() < 0.5), 3),
    "not finite": (lambda bench, draw: bench.commit(spoilt=draw.randrange(100)), 1),
    "failure": (_fail, 1.5),
    "slow ranks": (lambda bench, draw: bench.limit_prompts(draw.choice((1, 3, 100))), 0.5),
    "drain": (lambda bench, draw: bench.drain(), 0.3),
}
