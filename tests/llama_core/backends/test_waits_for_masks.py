"""A rank that waits for the mask of a grammar does not compute: the time counts as waited, not as sampling."""

import time
from pathlib import Path
from typing import Any

import pytest

from llama_core.backends.parallel import alone
from llama_core.grammar.build import regex_grammar
from llama_core.grammar.masks import SlotGrammars
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit, StepInput
from llama_core.text.registry import load_tokenizer
from tests.support import on_ranks

DEMO = Path(__file__).parents[3] / "demo"
TOKENIZER = load_tokenizer(DEMO / "tokenizer.model")
MASK_S = 0.5  # longer than all else that a step does


@pytest.mark.parametrize("presence_penalty", [0.0, 1.0], ids=["without other rules", "with a penalty"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_time_of_a_late_mask_is_waited(
    monkeypatch: pytest.MonkeyPatch, backend: str, presence_penalty: float
) -> None:
    match = SlotGrammars._match

    def slow(self: SlotGrammars, *args: Any) -> Any:
        time.sleep(MASK_S)
        return match(self, *args)

    monkeypatch.setattr(SlotGrammars, "_match", slow)
    runner = on_ranks.new_runner(alone("cpu"), str(DEMO), backend=backend)
    params = SamplingParams(grammar=regex_grammar("[a-z]+"), max_tokens=9, presence_penalty=presence_penalty)
    prompt = TOKENIZER.encode("Tell", bos=True, eos=False)
    init = SlotInit(0, prompt, [0], params)
    waited, sampled = runner.seconds_waited(), runner.seconds_sampled()
    assert waited is not None and sampled is not None
    output = runner.step(StepInput(0, 1, rows=[Row(0, 0, len(prompt), True)], admit=[init]))
    assert output.mask_wait_ms is not None and 0 < output.mask_wait_ms < output.elapsed_ms
    now_waited, now_sampled = runner.seconds_waited(), runner.seconds_sampled()
    assert now_waited is not None and now_sampled is not None
    assert now_waited - waited > now_sampled - sampled
