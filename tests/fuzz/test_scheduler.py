"""The scheduler's rules under random operations, and faults that the rules must detect."""

from random import Random
from typing import Any

import pytest

from llama_core.errors import RankFailure
from llama_core.scheduling import admission, prefix_cache
from llama_core.scheduling import scheduler as scheduling
from llama_core.scheduling.adapter_places import AdapterPlaces
from llama_core.scheduling.admission import Admission
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.fair_queue import WaitingQueue
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.speculation import Speculation
from tests.fuzz import scheduler


@pytest.mark.parametrize("seed", [2, None], ids=["a known seed", "a random seed"])
def test_ten_thousand_random_operations_break_no_rule(seed: int | None) -> None:
    outcome = scheduler.run(10_000, seed=Random().randrange(10**6) if seed is None else seed)
    assert outcome.findings == [] and outcome.cases == 10_000
    # The caches of a random seed may all be large enough that nothing is preempted.
    assert seed is None or all(outcome.extra[what] for what in ("preemptions", "prefix_hit_tokens", "deferrals"))


# The rules must detect each of these injected faults.


def _leak(pool: BlockPool, blocks: Any) -> None:
    _release(pool, blocks[1:])


def _lose(self: Scheduler, epoch: int, failure: RankFailure | None = None) -> Sequence | None:
    harmful = _restart(self, epoch, failure)
    if self.num_waiting > 1:
        self.admission.waiting.remove(self.admission.waiting.first({}))
    return harmful


def _forget_drafts(self: Speculation, *given: Any) -> int:
    return min(_verify(self, *given) + 1, len(given[3]) - 1)


def _newest_first(queue: WaitingQueue, num_running: Any) -> Sequence:
    return list(queue)[-1]


_release, _restart, _verify = BlockPool.release, Scheduler.restart, Speculation.verify


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a leak": (BlockPool, "release", _leak),
    "one is passed over": (WaitingQueue, "first", _newest_first),
    "a request is lost": (Scheduler, "restart", _lose),
    "a wrong draft": (Speculation, "verify", _forget_drafts),
    "new ranks lack adapters": (AdapterPlaces, "forget", lambda places: None),
    "short prompts take whole steps": (scheduling, "for_shorter", lambda budget: budget),
    "a long prompt overtakes": (admission, "overtakes", lambda *given: True),
    "a newcomer is shut out": (WaitingQueue, "last_of_largest", lambda *given, **limit: []),
    "one owner keeps all places": (Admission, "preemptible_for_place", lambda *given: []),
    "background sequences do not give way": (admission, "are_background", lambda running: True),
    "a mean of a part of a prompt": (Sequence, "reads_whole_prompt", property(lambda seq: seq.wants_prompt_logprobs)),
    "an adapter finds another's prefix": (prefix_cache, "root_hash", lambda scope, adapter: b""),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_scheduler_with_an_injected_bug_breaks_a_rule(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(*FAULTS[what])
    assert scheduler.run(4000, seed=2).num_findings
