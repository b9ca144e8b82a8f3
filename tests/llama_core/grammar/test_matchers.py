"""What rank 0 keeps of grammars for later answers is bounded, and is made once."""

from concurrent.futures import wait
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from llguidance import LLMatcher

from llama_core.grammar import matchers
from llama_core.grammar import vocabulary as vocabularies
from llama_core.grammar.build import regex_grammar
from llama_core.grammar.masks import SlotGrammars
from llama_core.grammar.matchers import GrammarRefused, Matchers
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


def test_a_kept_grammar_needs_no_thread_unless_many_tokens_are_read() -> None:
    kept = Matchers(VOCABULARY)
    grammar = regex_grammar("[a-z ]+")
    tokens = TOKENIZER.encode("a long text of many words " * 4, bos=False, eos=False)
    wait([kept.begin("", grammar, [])])
    assert kept.begin("", grammar, tokens[:9]).done() and len(tokens) > 16
    read = kept.begin("", grammar, tokens).result()
    assert read.is_accepting() and not read.is_error()
    kept.close()
    with pytest.raises(GrammarRefused, match="no tokenizer"):
        Matchers(None).begin("", grammar, []).result()


def test_the_ids_of_forced_texts_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabularies, "_KEPT_TEXTS", 2)
    vocabulary = vocabularies._Vocabulary(TOKENIZER)
    for number in (1, 20, 256, 257, 2000):
        text = "a" * number
        assert vocabulary(text) == vocabulary(text) == list(vocabulary._ids_of(text.encode()))
        assert len(vocabulary._kept) <= 2 and max(map(len, vocabulary._kept), default=0) <= 256
