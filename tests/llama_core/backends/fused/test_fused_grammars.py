"""Grammars on a simulated device: their thread follows the tokens late."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_core.backends.parallel import alone
from llama_core.grammar.build import json_schema_grammar, regex_grammar
from llama_core.grammar.masks import SlotGrammars
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import SlotInit
from llama_core.text.registry import load_tokenizer
from tests.support import on_ranks
from tests.support.simulated_steps import Requests, simulated

DEMO = str(Path(__file__).parents[4] / "demo")
TOKENIZER = load_tokenizer(Path(DEMO) / "tokenizer.model")
SMALL = {"max_seq_len": 96, "max_batch_size": 5, "max_step_tokens": 32}
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
    # How many are refused depends on when masks come.
    assert run.drafts_accepted + run.drafts_refused > 10


def test_ranks_that_know_no_masks_join_the_collectives_of_late_samples(ranks: Any, expected: list[list[int]]) -> None:
    runs = ranks(2).call(partial(simulated, **SMALL), DEMO, requests(), 5, 0.3, TOKENIZER.stop_ids)  # type: ignore[arg-type]
    assert runs[0].outputs == runs[1].outputs == expected
    assert runs[0].collectives == runs[1].collectives
