"""What rank 0 keeps of grammars for later answers is bounded, and is made once."""

from functools import partial
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


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that are compiled, in order."""
    seen: list[str] = []
    make = Matchers._compiled

    def noted(self: Matchers, grammar: str) -> LLMatcher:
        seen.append(grammar)
        return make(self, grammar)

    monkeypatch.setattr(Matchers, "_compiled", noted)
    return seen


def test_the_grammars_used_last_are_kept(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matchers, "_KEPT_GRAMMARS", 3)
    kept = Matchers(VOCABULARY)
    for name in "abcacdacdb":
        kept.begin("", regex_grammar(name * 3), []).result()
    assert compiled == [regex_grammar(name * 3) for name in "abcdb"]
    kept.begin("", regex_grammar("bbb"), [], is_alone=True).result()
    kept.drop("", regex_grammar("bbb"))
    kept.begin("", regex_grammar("bbb"), []).result()
    assert compiled[5:] == [regex_grammar("bbb")] * 2
    kept.close()


@pytest.mark.parametrize(
    ("pattern", "scopes", "num_refused", "times"),
    [
        ("[ab]{9}", ("", "key a", "key b", "key a"), 0, 3),
        ("".join(f"[a-{chr(98 + i % 20)}]?" for i in range(1600)), ("",) * 4, 4, 1),
        ("(a{1000}){1000}", ("",) * 4, 4, 2),
    ],
    ids=["scopes share none", "refused", "refused in two parts"],
)
def test_a_grammar_is_compiled_once_for_the_rows_of_a_scope_also_if_it_cannot_be_followed(
    pattern: str, scopes: tuple[str, ...], num_refused: int, times: int, compiled: list[str]
) -> None:
    slots = SlotGrammars(VOCABULARY, TOKENIZER.n_words, 4)
    params = SamplingParams(max_tokens=9, grammar=regex_grammar(pattern))
    for slot, scope in enumerate(scopes):
        slots.admit(SlotInit(slot, [1, 5], [0], params, cache_scope=scope))
    step = slots.begin([Row(slot, 0, 2, True) for slot in range(4)])
    assert step is not None
    step.wait()
    slots.close()
    assert (len(step.reasons), len(compiled)) == (num_refused, times)
