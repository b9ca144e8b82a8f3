"""Grammars on a simulated device: their thread follows the tokens late, and nothing else waits for it."""

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from llama_core.execution.parallel import alone
from llama_core.execution.runner import ModelRunner
from llama_core.grammar.build import json_schema_grammar, regex_grammar
from llama_core.grammar.masks import SlotGrammars
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Pending, Row, SlotInit, StepInput, StepOutput
from llama_core.text.registry import load_tokenizer
from tests.support import on_ranks
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_steps import Requests, simulated, simulated_runner

DEMO = str(Path(__file__).parents[3] / "demo")
TOKENIZER = load_tokenizer(Path(DEMO) / "tokenizer.model")
SMALL = {"max_seq_len": 96, "max_batch_size": 5, "max_step_tokens": 32}
LATE_S = 120.0  # until a test whose steps wait for masks fails
FORCED = regex_grammar("(a|b)the quick brown fox jumps over the lazy dog( and [a-z]{9})?")
OPEN = regex_grammar("[a-z]{1,3}( [a-z]{2,9}){20,30}")
FEW = regex_grammar("((ab|ac|b) ){20,40}")
OBJECT = json_schema_grammar(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "legs": {"type": "integer", "maximum": 8}},
        "required": ["name", "legs"],
        "additionalProperties": False,
    }
)


def params_of(seed: int, grammar: str = "", max_tokens: int = 50) -> SamplingParams:
    return SamplingParams(1.0, 1.0, seed=seed, max_tokens=max_tokens, grammar=grammar)


def requests() -> Requests:
    texts = ("Tell me of a cat", "Once upon a time there was", "The", "A plant is a", "Say")
    followed = (FORCED, OBJECT, "", OPEN, FEW)
    found = [
        (TOKENIZER.encode(text, bos=True, eos=False), params_of(seed, grammar))
        for seed, (text, grammar) in enumerate(zip(texts, followed, strict=True))
    ]
    found[3] = found[3][0], replace(found[3][1], logprobs=2)
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    outputs: list[list[int]] = on_ranks.serve(alone("cpu"), DEMO, requests(), backend="torch")["outputs"]
    return outputs


@pytest.mark.parametrize(
    ("eagerness", "lost_after"), [(0.0, 30), pytest.param(0.5, -1, marks=pytest.mark.full)], ids=["lost", "eager"]
)
def test_late_tokens_reach_the_grammars_with_drafts_preemptions_and_new_ranks(
    eagerness: float, lost_after: int, expected: list[list[int]]
) -> None:
    stop_ids = TOKENIZER.stop_ids
    run = simulated(alone("cpu"), DEMO, requests(), 3, eagerness, stop_ids, lost_after, num_blocks=6, **SMALL)
    assert run.outputs == expected
    assert run.preemptions > 0 and run.drafts_accepted > 10 and run.drafts_refused > 4


def test_tokens_are_the_same_where_masks_are_late_and_deferred(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of rows that follow a deferred one, whose input is the token 0, with drafts, preemptions and new ranks."""
    admit, fill_row, calls, num_deferred = SlotGrammars.admit, SlotGrammars._fill_row, random.Random(1), 0

    def defers(self: SlotGrammars, init: SlotInit) -> None:
        if not self._defers:
            self.prepare()
        admit(self, init)

    def late(self: SlotGrammars, row: Any, masks: Any, deadline_s: float) -> None:
        nonlocal num_deferred
        if calls.random() < 0.1:
            masks.defer(row)
        else:
            fill_row(self, row, masks, deadline_s)
        num_deferred += row.sample in masks.deferred

    monkeypatch.setattr(SlotGrammars, "admit", defers)
    monkeypatch.setattr(SlotGrammars, "_fill_row", late)
    run = simulated(alone("cpu"), DEMO, requests(), 3, 0.3, TOKENIZER.stop_ids, 30, num_blocks=6, **SMALL)
    assert run.outputs == expected and num_deferred > 20 and run.preemptions > 0


@pytest.mark.full
def test_ranks_that_know_no_masks_join_the_collectives_of_late_samples(ranks: Any, expected: list[list[int]]) -> None:
    runs = ranks(2).call(partial(simulated, **SMALL), DEMO, requests(), 5, 0.3, TOKENIZER.stop_ids)  # type: ignore[arg-type]
    assert runs[0].outputs == runs[1].outputs == expected
    assert runs[0].collectives == runs[1].collectives


@pytest.fixture(scope="module")
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture(scope="module")
def runner(device: SimulatedDevice) -> ModelRunner:
    return simulated_runner(alone("cpu"), DEMO, device, **SMALL)


@pytest.fixture
def step(runner: ModelRunner) -> Iterator[Any]:
    """Starts steps of two rows, the first of which has a grammar, after one that has read their prompts."""
    blocks, prompt = runner.config.blocks_per_sequence, TOKENIZER.encode("Say", bos=True, eos=False)
    admit = [
        SlotInit(
            slot, prompt, list(range(slot * blocks, (slot + 1) * blocks)), params_of(slot, OPEN if not slot else "")
        )
        for slot in range(2)
    ]
    runner.step(StepInput(0, 1, [Row(slot, 0, len(prompt), True) for slot in range(2)], admit=admit))
    positions = iter(range(len(prompt), 90))

    def start() -> Pending[StepOutput]:
        position = next(positions)
        return runner.start(StepInput(0, 2, [Row(slot, position, 1, True) for slot in range(2)]))

    yield start
    for slot in range(2):  # the next test's steps have no grammar before they admit one
        runner._grammars.admit(SlotInit(slot, prompt, [], SamplingParams()))  # type: ignore[union-attr]


class _Gate:
    """Holds the grammars' thread before it makes the masks of a step."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.was_late = False
        self._fill = SlotGrammars._fill

    def __enter__(self) -> "_Gate":
        gate = self

        def fill(grammars: SlotGrammars, *args: Any) -> None:
            gate.was_late |= not gate.is_open.wait(LATE_S)
            gate._fill(grammars, *args)

        self._patch = patch.object(SlotGrammars, "_fill", fill)
        self._patch.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.is_open.set()
        self._patch.stop()


def test_the_tokens_of_a_step_leave_before_the_masks_of_the_next_one(step: Any) -> None:
    first = step()
    with _Gate() as gate:
        second = step()
        tokens = first.result().tokens
        assert not second.is_ready(), "its samples are not queued"
        assert not gate.was_late and len(tokens) == 2
        gate.is_open.set()
        assert len(second.result().tokens) == 2
