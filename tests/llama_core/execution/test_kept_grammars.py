"""What rank 0 keeps of grammars for later requests is bounded in bytes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from llama_core.execution.grammars import follower
from llama_core.execution.grammars.follower import CompiledGrammar, CompiledGrammars
from llama_core.execution.grammars.heap import num_heap_bytes
from llama_core.execution.grammars.masks import SlotGrammars
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit
from llama_core.text import grammar as grammars
from llama_core.text import grammar_vocabulary as vocabularies
from llama_core.text.registry import load_tokenizer
from llama_core.text.vocabulary_file import VocabularyFile

DEMO = Path(__file__).parents[3] / "demo"
TOKENIZER = load_tokenizer(DEMO / "tokenizer.model")
MIB = 2**20

needs_heap = pytest.mark.skipif(not num_heap_bytes(), reason="the C library does not tell its use of memory")


def compiled_grammars() -> CompiledGrammars:
    path = str(DEMO / "tokenizer.model")
    vocabulary = VocabularyFile(path, TOKENIZER.n_words, tuple(sorted(TOKENIZER.stop_ids)))
    return CompiledGrammars(vocabulary, TOKENIZER.n_words)


def multiple(number: int) -> str:
    """A grammar that takes 4 to 10 MB compiled for the masks and for looking ahead."""
    return grammars.json_schema_grammar({"type": "integer", "multipleOf": number})


@needs_heap
def test_kept_grammars_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_FOLLOWED_BYTES", 0)
    monkeypatch.setattr(follower, "_KEPT_BYTES", 24 * MIB)
    kept = compiled_grammars()
    kept.prepare()
    before = num_heap_bytes()
    numbers = [9967, 9973, 9949, 9941, 9931, 9929, 9923, 9907]
    for number in numbers:
        assert MIB < kept.compiled("", multiple(number)).num_bytes < 12 * MIB
        assert kept.find("", multiple(numbers[0])) is not None  # the grammar in use is not the least recently used one
    assert num_heap_bytes() - before < 28 * MIB
    assert kept.find("", multiple(numbers[-1])) is not None and kept.find("", multiple(numbers[1])) is None


def test_a_grammar_beyond_the_bound_is_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_KEPT_BYTES", 1)
    kept = compiled_grammars()
    first, second = kept.compiled("", multiple(3)), kept.compiled("", multiple(7))
    assert kept.find("", multiple(7)) is second and kept.find("", multiple(3)) is None
    assert first.matcher.compute_bitmask()  # an answer goes on with it


def test_a_compiled_grammar_is_shared_within_its_scope_alone() -> None:
    kept, grammar = compiled_grammars(), multiple(3)
    first = kept.compiled("key a", grammar)
    assert kept.compiled("key a", grammar) is first and kept.find("key b", grammar) is None
    assert kept.compiled("key b", grammar) is not first and kept.find("key a", grammar) is first


def test_only_sequences_of_one_scope_share_a_compiled_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    num_compiled, compile_it = count(), CompiledGrammars.compiled_alone

    def counted(self: CompiledGrammars, grammar: str) -> CompiledGrammar:
        next(num_compiled)
        return compile_it(self, grammar)

    monkeypatch.setattr(CompiledGrammars, "compiled_alone", counted)
    slots = SlotGrammars(compiled_grammars()._load, TOKENIZER.n_words, 4, 64)
    params = SamplingParams(max_tokens=9, grammar=multiple(3))
    for slot, scope in enumerate(("", "key a", "key b", "key a")):
        slots.admit(SlotInit(slot, [1, 5], [0], params, cache_scope=scope))
    for rows in ([0], [1, 2, 3]):
        step = slots.begin([Row(slot, 0, 2, True) for slot in rows])
        assert step is not None
        step.wait()
        slots.follow(step, lambda: [0])
        assert not step.reasons
    slots.close()
    assert next(num_compiled) == 3


def test_the_ids_of_forced_texts_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabularies, "_CACHED_BYTES", 10_000)
    vocabulary = vocabularies._Vocabulary(TOKENIZER)
    for number in range(1, 80):
        text = "a" * (number * 20)
        assert vocabulary(text) == vocabulary(text) == vocabulary._ids_of(text.encode())
        assert vocabulary._num_cached_bytes == sum(map(len, vocabulary._cached)) <= 10_000
    assert text.encode() in vocabulary._cached and b"a" * 20 not in vocabulary._cached
    vocabulary("a" * 10_001)
    assert not vocabulary._cached


def test_threads_that_compile_at_once_load_one_vocabulary() -> None:
    load, both, num_loads = compiled_grammars()._load, threading.Barrier(2), count()
    assert load is not None

    def counted() -> LLTokenizer:
        next(num_loads)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # for the other thread, if it loads too
        return load()

    compiled = CompiledGrammars(counted, TOKENIZER.n_words)
    schemas = [grammars.json_schema_grammar({"type": kind}) for kind in ("integer", "string")]
    with ThreadPoolExecutor(2) as threads:
        assert len(list(threads.map(partial(compiled.compiled, ""), schemas))) == 2
    assert next(num_loads) == 1
