"""Slow grammars delay their own rows alone, and change no token: compiled on a thread, followed by a process, deferred."""

import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_core.errors import NotReady
from llama_core.execution.grammars import follower
from llama_core.execution.grammars import process as grammar_process
from llama_core.execution.grammars.follower import AnswerFollower, CompiledGrammar, CompiledGrammars, GrammarRefused
from llama_core.execution.grammars.masks import SlotGrammars
from llama_core.execution.grammars.process import SlowRow
from llama_core.execution.grammars.rows import GrammarSlot
from llama_core.execution.parallel import alone
from llama_core.execution.runner import ModelRunner
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import Row, SlotInit, StepInput, StepOutput
from llama_core.text import grammar as grammars
from llama_core.text.grammar_vocabulary import grammar_vocabulary
from llama_core.text.registry import load_tokenizer
from llama_core.text.vocabulary_file import VocabularyFile
from tests.support import on_ranks

DEMO = Path(__file__).parents[3] / "demo"
TOKENIZER = load_tokenizer(DEMO / "tokenizer.model")
VOCABULARY = VocabularyFile(str(DEMO / "tokenizer.model"), TOKENIZER.n_words, tuple(sorted(TOKENIZER.stop_ids)))
LATE_S = 120.0  # until a test that waits for something fails
UNIQUE = {"type": "array", "items": {"enum": ["a cat", "a dog", "red", 7]}, "uniqueItems": True, "minItems": 3}
GRAMMARS = (
    grammars.regex_grammar("(a|b)the quick brown fox jumps over the lazy dog( [a-z]{2,9}){20,30}"),
    grammars.regex_grammar("[a-z]{1,3}( [a-z]{2,9}){20,30}"),
    grammars.checked_grammar(grammars.json_schema_grammar(UNIQUE), "g"),
    grammars.json_schema_grammar({"type": "array", "items": {"type": "string"}, "minItems": 2}),
    grammars.lark_grammar('start: s\ns: s s | "a" | "b"'),
)
Requests = list[tuple[list[int], SamplingParams]]


def requests() -> Requests:
    found = []
    for seed, grammar in enumerate([*GRAMMARS, "", ""]):
        followed = grammars.for_answer(grammar, TOKENIZER) if grammar else ""
        params = SamplingParams(1.0, 1.0, seed=seed, max_tokens=90, grammar=followed, logprobs=0)
        found.append((TOKENIZER.encode("Tell me of a cat", bos=True, eos=False)[: 2 + seed], params))
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    found: list[list[int]] = on_ranks.serve(alone("cpu"), str(DEMO), requests())["outputs"]
    return found


@pytest.fixture
def runner() -> Iterator[ModelRunner]:
    """Its grammars may defer samples, as those of a server's ranks."""
    runner = on_ranks.new_runner(alone("cpu"), str(DEMO))
    runner.prepare_grammars()
    yield runner
    grammars_of(runner).close()


@pytest.fixture
def all_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each grammar is handed to the process after its first row, and every third time that a row waits it is deferred."""
    waits, calls = GrammarSlot.is_pending, count()

    def is_pending(slot: Any, longest_s: float | None) -> bool:
        pending: bool = waits(slot, None if longest_s is None else 0.0 if next(calls) % 3 == 0 else LATE_S)
        return pending

    monkeypatch.setattr(CompiledGrammar, "is_slow", True)
    monkeypatch.setattr(GrammarSlot, "is_pending", is_pending)


def grammars_of(runner: ModelRunner) -> SlotGrammars:
    assert runner._grammars is not None
    return runner._grammars


def pid_of(runner: ModelRunner) -> int:
    process = grammars_of(runner)._process
    assert process is not None and process.pid is not None
    return process.pid


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
    runner: ModelRunner, expected: list[list[int]], all_are_slow: None, how: dict[str, Any]
) -> None:
    served = Served(runner, requests(), **how)
    served.run()
    assert served.outputs == expected and all(seq.error is None for seq in served.sequences)
    assert served.num_deferred > 20 and pid_of(runner)
    assert "num_blocks" not in how or served.scheduler.num_preemptions
    assert "max_drafts" not in how or served.scheduler.num_drafts_accepted
    assert all(len(seq.logprobs) == len(seq.output) for seq in served.sequences)


def test_a_process_that_is_killed_costs_no_answer(
    runner: ModelRunner, expected: list[list[int]], all_are_slow: None
) -> None:
    served = Served(runner, requests())
    pids = []
    for length in (3, 9, 15):
        served.run(until=lambda length=length: len(served.sequences[2].output) >= length)  # type: ignore[misc]
        pids.append(pid_of(runner))
        os.kill(pids[-1], signal.SIGKILL)
    served.run()
    assert served.outputs == expected and len({*pids, pid_of(runner)}) == 4


def test_rows_do_not_wait_while_a_grammar_is_compiled(
    runner: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, goes_on = CompiledGrammars._compile, threading.Event()

    def slow(self: CompiledGrammars, grammar: str) -> Any:
        if '"a" | "b"' in grammar.replace('\\"', '"'):
            assert goes_on.wait(LATE_S)
        return compiled(self, grammar)

    monkeypatch.setattr(CompiledGrammars, "_compile", slow)
    asked = requests()
    served = Served(runner, [*asked[4:], asked[4]])  # those that are compiled before are not held up by it
    slow_ones = served.sequences[0], served.sequences[-1]
    served.run(until=lambda: all(seq.finished for seq in served.sequences if seq not in slow_ones))
    assert served.outputs[1:-1] == expected[5:] and not any(seq.output for seq in slow_ones)
    assert served.num_deferred >= 20
    goes_on.set()
    served.run()
    assert served.outputs[0] == served.outputs[-1] == expected[4]


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_do_not_wait_for_a_mask_that_takes_long_at_once(
    runner: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    masks, goes_on, num_calls = AnswerFollower.masks, threading.Event(), Counter[int]()

    def slow(self: AnswerFollower, tokens: list[int], position: int, *args: Any) -> Any:
        num_calls[position - self.first] += 1
        if position - self.first in (0, 5):
            assert goes_on.wait(LATE_S)
        return masks(self, tokens, position, *args)

    monkeypatch.setattr(AnswerFollower, "masks", slow)
    served = Served(runner, requests()[4:], depth=depth)
    slow_one, *others = served.sequences
    served.run(until=lambda: all(seq.finished for seq in others))
    assert [seq.output for seq in others] == expected[5:] and not slow_one.output and served.num_deferred > 10
    goes_on.set()
    served.run()
    assert slow_one.output == expected[4]
    assert set(num_calls.values()) == {1}, "a mask that was late is not computed again"


def test_answers_beyond_the_limits_do_not_share_the_grammar_compiled_again(
    runner: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    match, begun = AnswerFollower._match, defaultdict[int, list[CompiledGrammar]](list)

    def exceeds(self: AnswerFollower, tokens: list[int], position: int, *args: Any) -> None:
        if position == self.first + 3:
            begun[id(self)].append(self.compiled)
            if len(begun[id(self)]) == 1:
                raise follower._Exceeded("too large")
        match(self, tokens, position, *args)

    monkeypatch.setattr(AnswerFollower, "_match", exceeds)
    asked = requests()[1]
    served = Served(runner, [asked, asked, asked])
    served.run()
    assert served.outputs == [expected[1]] * 3
    first, again = zip(*begun.values(), strict=True)
    assert len(set(map(id, first))) == 1 and len(set(map(id, again))) == 3


def test_a_grammar_that_is_refused_is_not_compiled_for_the_rows_in_flight(
    runner: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def refused(self: CompiledGrammars, grammar: str) -> Any:
        made.append(grammar)
        raise GrammarRefused("too large")

    monkeypatch.setattr(CompiledGrammars, "compiled_alone", refused)
    served = Served(runner, requests()[4:], depth=3)
    served.run()
    assert served.sequences[0].error is not None and served.outputs[1:] == expected[5:] and len(made) == 1


def test_ranks_that_schedule_for_themselves_wait_instead(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, all_are_slow: None
) -> None:
    compiled = CompiledGrammars._compile

    def slow(self: CompiledGrammars, grammar: str) -> Any:
        time.sleep(0.1)
        return compiled(self, grammar)

    monkeypatch.setattr(CompiledGrammars, "_compile", slow)
    served = Served(on_ranks.new_runner(alone("cpu"), str(DEMO)), requests(), depth=1)
    served.run()
    assert served.outputs == expected and not served.num_deferred


def test_a_row_that_takes_too_long_is_refused_alone(
    runner: ModelRunner, expected: list[list[int]], all_are_slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "LONGEST_S", 0.0)
    served = Served(runner, requests()[4:])
    served.run()
    assert served.outputs[1:] == expected[5:] and served.sequences[0].error is not None
    assert "a token takes over 0 s" in served.sequences[0].error.message
    assert grammars_of(runner)._process.pid is None  # type: ignore[union-attr]


def test_a_process_keeps_no_matcher_of_an_ended_answer(
    runner: ModelRunner, all_are_slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    process = grammars_of(runner)._process
    assert process is not None
    monkeypatch.setattr(process, "forget", ended.append)
    asked = [(prompt, replace(params, max_tokens=4)) for prompt, params in requests()[:2]]
    Served(runner, 8 * asked).run()
    assert len(ended) == len(set(ended)) >= 16 - len(grammars_of(runner)._slots)
    monkeypatch.undo()
    Served(
        runner, 8 * [(prompt, replace(params, grammar=grammars.regex_grammar("[ab]{4}"))) for prompt, params in asked]
    ).run()
    assert all(key < 16 for key in process._ended), "answers that no process followed"
    kept = grammar_process._Followers(CompiledGrammars(VOCABULARY, VOCABULARY.vocab_size))
    ours, theirs = Pipe()
    with ours, theirs:
        for key in range(3):
            kept.answer(SlowRow(key, "", grammars.regex_grammar("ab"), 1, None, [], []), theirs)
        assert kept._grammars.find("", grammars.regex_grammar("ab")) is not None
        assert kept._grammars.find("key a", grammars.regex_grammar("ab")) is None
        kept.answer(SlowRow(3, "key a", grammars.regex_grammar("ab"), 1, None, [], []), theirs)
        assert kept._grammars.find("key a", grammars.regex_grammar("ab")) is not None
        kept.forget([0, 2, 3, 7])
        assert list(kept._followers) == [1]


def test_without_a_process_the_request_gets_the_servers_fault(
    runner: ModelRunner, expected: list[list[int]], all_are_slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    served = Served(runner, requests()[4:])
    served.run()
    assert served.outputs[1:] == expected[5:] and isinstance(served.sequences[0].error, NotReady)


def test_an_answer_that_has_ended_is_followed_no_more(runner: ModelRunner, all_are_slow: None) -> None:
    """Also where no other sequence gets its slot."""
    served = Served(runner, requests(), depth=1)
    for _ in range(4):
        served.step()
    seq = served.sequences[0]
    assert seq.slot is not None and (followed := grammars_of(runner)._slots[seq.slot]) is not None
    slot = seq.slot
    served.scheduler.finish(seq, FinishReason.ABORT)
    served.step()
    assert followed.is_ended and grammars_of(runner)._slots[slot] is None
    served.run()


def test_a_grammar_is_slow_once_its_masks_have_taken_long() -> None:
    grammar, seconds = CompiledGrammar(None, None, None), 0.0  # type: ignore[arg-type]
    for _ in range(1000):
        for _ in range(40):
            grammar.count(0.0001)
        grammar.count(0.012)
    assert not grammar.is_slow, "rather slow ones now and then"
    grammar.count(5.0)
    assert not grammar.is_slow, "one pause of the rank"
    for _ in range(1000):
        grammar.count(0.0001)
    assert grammar.is_quick
    while not grammar.is_slow:
        seconds += 0.04
        grammar.count(0.04)
    assert 0.1 < seconds < 0.2


def test_rows_behind_a_deferred_one_are_void_and_the_next_admission_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, goes_on = CompiledGrammars._compile, threading.Event()
    monkeypatch.setattr(
        CompiledGrammars, "_compile", lambda self, grammar: goes_on.wait(LATE_S) and compiled(self, grammar)
    )
    vocabulary = grammar_vocabulary(TOKENIZER, TOKENIZER.stop_ids)
    slots = SlotGrammars(lambda: vocabulary, TOKENIZER.n_words, 1, 160)
    slots.prepare()
    params = SamplingParams(grammar=grammars.regex_grammar("[ab]{9}"), max_tokens=9)
    slots.admit(SlotInit(0, [1, 5], [0], params))

    def step(start: int) -> tuple[list[int], np.ndarray]:
        masks = slots.begin([Row(0, start, 1, True)])
        assert masks is not None
        masks.wait()
        slots.follow(masks, partial(list, [0]))
        assert not masks.reasons
        return masks.deferred, masks.bits

    assert [step(start)[0] for start in (1, 2, 3)] == [[0], [0], [0]]
    goes_on.set()
    assert step(4)[0] == [0], "the masks of the first position are ready, not those of this one"
    while (found := step(1))[0]:
        pass
    slots.admit(SlotInit(0, [1, 5], [0], params))
    assert (step(1)[1] == found[1]).all() and found[1].any()
    slots.close()


def test_a_deferred_step_says_so_and_refuses_nothing(runner: ModelRunner, all_are_slow: None) -> None:
    params = SamplingParams(grammar=grammars.regex_grammar("[ab]{9}"), max_tokens=9)
    init = SlotInit(0, [1, 5], [0], params)
    output = runner.step(StepInput(0, 0, [Row(0, 0, 2, True)], admit=[init]))
    assert output.deferred == [0] and not output.refused and not output.non_finite
