"""What rank 0 keeps of grammars for later answers is bounded, and is made once."""

from functools import partial
from itertools import count
from pathlib import Path

import pytest
from llguidance import LLMatcher

from llama_core.grammar import matchers
from llama_core.grammar.build import regex_grammar
from llama_core.grammar.masks import SlotGrammars
from llama_core.grammar.matchers import Matchers
from llama_core.grammar.vocabulary import grammar_vocabulary
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit
from llama_core.text.registry import load_tokenizer

TOKENIZER = load_tokenizer(Path(__file__).parents[3] / "demo" / "tokenizer.model")
VOCABULARY = partial(grammar_vocabulary, TOKENIZER, TOKENIZER.stop_ids)


def test_the_grammars_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matchers, "_KEPT_GRAMMARS", 3)
    compiled: list[str] = []
    make = Matchers._compiled

    def noted(self: Matchers, grammar: str) -> LLMatcher:
        compiled.append(grammar)
        return make(self, grammar)

    monkeypatch.setattr(Matchers, "_compiled", noted)
    kept = Matchers(VOCABULARY)
    for name in "abcacdacdb":
        kept.begin("", regex_grammar(name * 3), []).result()
    assert compiled == [regex_grammar(name * 3) for name in "abcdb"]
    kept.begin("", regex_grammar("bbb"), [], is_alone=True).result()
    kept.drop("", regex_grammar("bbb"))
    kept.begin("", regex_grammar("bbb"), []).result()
    assert compiled[5:] == [regex_grammar("bbb")] * 2
    kept.close()


def test_only_sequences_of_one_scope_share_a_compiled_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    num_compiled, make = count(), Matchers._compiled

    def counted(self: Matchers, grammar: str) -> LLMatcher:
        next(num_compiled)
        return make(self, grammar)

    monkeypatch.setattr(Matchers, "_compiled", counted)
    slots = SlotGrammars(VOCABULARY, TOKENIZER.n_words, 4)
    params = SamplingParams(max_tokens=9, grammar=regex_grammar("[ab]{9}"))
    for slot, scope in enumerate(("", "key a", "key b", "key a")):
        slots.admit(SlotInit(slot, [1, 5], [0], params, cache_scope=scope))
    step = slots.begin([Row(slot, 0, 2, True) for slot in range(4)])
    assert step is not None
    step.wait()
    assert not step.reasons
    slots.close()
    assert next(num_compiled) == 3


@pytest.mark.parametrize(
    ("pattern", "times"), [("".join(f"[a-{chr(98 + i % 20)}]?" for i in range(1600)), 1), ("(a{1000}){1000}", 2)]
)
def test_a_grammar_that_cannot_be_followed_is_not_tried_for_each_row(
    pattern: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_compiled, make = count(), Matchers._compiled

    def counted(self: Matchers, grammar: str) -> LLMatcher:
        next(num_compiled)
        return make(self, grammar)

    monkeypatch.setattr(Matchers, "_compiled", counted)
    slots = SlotGrammars(VOCABULARY, TOKENIZER.n_words, 4)
    params = SamplingParams(max_tokens=9, grammar=regex_grammar(pattern))
    for slot in range(4):
        slots.admit(SlotInit(slot, [1, 5], [0], params))
    step = slots.begin([Row(slot, 0, 2, True) for slot in range(4)])
    assert step is not None
    step.wait()
    assert len(step.reasons) == 4
    slots.close()
    assert next(num_compiled) == times
