"""A grammar that is late or slow delays its own row alone, and changes no token."""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_core.backends.parallel import alone
from llama_core.backends.runner import ModelRunner
from llama_core.errors import NoTokenAllowed
from llama_core.grammar import masks
from llama_core.grammar.answers import answer_grammar
from llama_core.grammar.build import json_schema_grammar, lark_grammar, regex_grammar
from llama_core.grammar.masks import SlotGrammars
from llama_core.grammar.matchers import Matchers
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepOutput
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.registry import load_tokenizer
from llama_core.text.tools.tool_format import find_tool_format
from tests.support import on_ranks

DEMO = Path(__file__).parents[3] / "demo"
TOKENIZER = load_tokenizer(DEMO / "tokenizer.model")
LATE_S = 120.0  # until a test that waits for something fails
WORDS = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 3, "maxItems": 5}
GRAMMARS = (
    regex_grammar("(a|b)the quick brown fox jumps over the lazy dog( [a-z]{2,9}){20,30}"),
    regex_grammar("[a-z]{1,3}( [a-z]{2,9}){20,30}"),
    json_schema_grammar(WORDS),
    json_schema_grammar({"type": "array", "items": {"type": "string"}, "minItems": 2}),
    lark_grammar('start: s\ns: s s | "a" | "b"'),
)
Requests = list[tuple[list[int], SamplingParams]]


def requests() -> Requests:
    form = AnswerFormat(TOKENIZER, find_tool_format("hermes"), marks=None)
    found = []
    for seed, grammar in enumerate([*GRAMMARS, "", ""]):
        followed = answer_grammar(form, grammar, "field")
        params = SamplingParams(1.0, 1.0, seed=seed, max_tokens=90, grammar=followed, logprobs=0)
        found.append((TOKENIZER.encode("Tell me of a cat", bos=True, eos=False)[: 2 + seed], params))
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Of each request alone."""
    return [on_ranks.serve(alone("cpu"), str(DEMO), [request])["outputs"][0] for request in requests()]


@pytest.fixture
def runner() -> Iterator[ModelRunner]:
    """Its grammars may defer samples, as those of a server's ranks."""
    runner = on_ranks.new_runner(alone("cpu"), str(DEMO))
    runner.prepare_grammars()
    yield runner
    grammars_of(runner).close()


@pytest.fixture
def often_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the rows that may be deferred is."""
    fill_row, draw = SlotGrammars._fill_row, random.Random(3)

    def late(self: SlotGrammars, row: Any, of_step: Any, deadline_s: float) -> None:
        if self._defers and draw.random() < 0.33:
            of_step.defer(row)
        else:
            fill_row(self, row, of_step, deadline_s)

    monkeypatch.setattr(SlotGrammars, "_fill_row", late)


def grammars_of(runner: ModelRunner) -> SlotGrammars:
    assert runner._grammars is not None
    return runner._grammars


class Served:
    """Requests on a scheduler that sends `depth` steps before it reads the output of the first, as a server does."""

    def __init__(
        self,
        runner: ModelRunner,
        asked: Requests,
        *,
        depth: int = 2,
        num_blocks: int | None = None,
        max_drafts: int = 0,
    ) -> None:
        self.runner = runner
        self.depth = depth
        self.num_deferred = 0
        self.sequences = [Sequence(prompt, params, len(prompt) + params.max_tokens) for prompt, params in asked]
        config = SchedulerConfig(8, 64, TOKENIZER.stop_ids, max_drafts=max_drafts)
        block_size = runner.config.block_size
        self.scheduler = Scheduler(config, BlockPool(num_blocks or runner.max_num_blocks(), block_size))
        self.in_flight: deque[StepOutput] = deque()
        for seq in self.sequences:
            self.scheduler.add(seq)

    @property
    def outputs(self) -> list[list[int]]:
        return [seq.output for seq in self.sequences]

    def step(self) -> None:
        while len(self.in_flight) < self.depth and (batch := self.scheduler.schedule()) is not None:
            self.in_flight.append(self.runner.step(batch))
        output = self.in_flight.popleft()
        self.num_deferred += len(output.deferred)
        assert not set(output.deferred) & {i for i, _ in output.refused}
        self.scheduler.commit(output)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while (self.scheduler.has_work or self.in_flight) and not until():
            self.step()


@pytest.mark.parametrize(
    "how",
    [{"depth": 1}, {"depth": 2}, {"depth": 3}, {"num_blocks": 10}, {"max_drafts": 24}, {"max_drafts": 24, "depth": 3}],
    ids=["one step in flight", "two", "three", "preempted", "with drafts", "with drafts and three steps in flight"],
)
def test_tokens_of_deferred_rows_are_the_same(
    runner: ModelRunner, expected: list[list[int]], often_late: None, how: dict[str, Any]
) -> None:
    served = Served(runner, requests(), **how)
    served.run()
    assert served.outputs == expected and all(seq.error is None for seq in served.sequences)
    assert served.num_deferred > 20
    assert "num_blocks" not in how or served.scheduler.num_preemptions
    assert "max_drafts" not in how or "depth" in how or served.scheduler.speculation.num_accepted
    assert all(len(seq.logprobs) == len(seq.output) for seq in served.sequences)


def test_rows_do_not_wait_while_a_grammar_is_compiled(
    runner: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, goes_on = Matchers._compiled, threading.Event()

    def slow(self: Matchers, grammar: str) -> Any:
        if '"a" | "b"' in grammar.replace('\\"', '"'):
            assert goes_on.wait(LATE_S)
        return compiled(self, grammar)

    monkeypatch.setattr(Matchers, "_compiled", slow)
    asked = requests()
    served = Served(runner, [*asked[4:], asked[4]])
    slow_ones = served.sequences[0], served.sequences[-1]
    served.run(until=lambda: all(seq.finished for seq in served.sequences if seq not in slow_ones))
    assert served.outputs[1:-1] == expected[5:] and not any(seq.output for seq in slow_ones)
    assert served.num_deferred >= 20
    goes_on.set()
    served.run()
    assert served.outputs[0] == served.outputs[-1] == expected[4]


@pytest.mark.parametrize("depth", [1, 2])
def test_slow_rows_pause_after_a_slow_mask_while_there_are_others(
    runner: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    monkeypatch.setattr(masks, "_QUICK_S", -1.0)  # all are slow
    monkeypatch.setattr(masks, "_PAUSES", 1e9)
    asked = requests()
    for i, _ in enumerate(GRAMMARS):
        Served(runner, asked[i : i + 1]).run()  # compiles
    grammars_of(runner)._slow_again_s = 0.0
    served = Served(runner, asked, depth=depth)
    followed, others = served.sequences[:5], served.sequences[5:]
    served.run(until=lambda: all(seq.finished for seq in others))
    assert 1 <= sum(len(seq.output) for seq in followed) <= 5, "the first masks, whose time is not known"
    served.run()
    assert served.outputs == expected and served.num_deferred > 50


def test_an_answer_whose_masks_are_too_slow_three_times_ends_alone(
    runner: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    match, slow_positions = SlotGrammars._match, (0, 4, 7)

    def slow(self: SlotGrammars, row: Any, bits: Any) -> Any:
        is_slow = '"a' in row.slot.grammar.replace("\\", "") and row.position - row.slot.first in slow_positions
        monkeypatch.setattr(masks, "_SLOW_S", -1.0 if is_slow else 1e9)
        return match(self, row, bits)

    monkeypatch.setattr(SlotGrammars, "_match", slow)
    served = Served(runner, requests()[4:])
    served.run()
    assert served.outputs == [expected[4][:7], *expected[5:]]
    error = served.sequences[0].error
    assert isinstance(error, NoTokenAllowed) and "the grammar is too slow: 3 tokens" in error.message
