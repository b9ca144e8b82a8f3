"""Rows with a grammar sample only what it allows, on every backend; other rows sample what they would without it."""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from llama_core.backends.parallel import alone
from llama_core.grammar import matchers
from llama_core.grammar.answers import answer_grammar
from llama_core.grammar.build import json_schema_grammar, lark_grammar, regex_grammar
from llama_core.grammar.masks import SlotGrammars
from llama_core.grammar.matchers import Matchers
from llama_core.grammar.vocabulary import grammar_vocabulary
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Draft, Row, SlotInit, StepInput
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.registry import load_tokenizer
from llama_core.text.tools.tool import Tool, ToolUse
from llama_core.text.tools.tool_format import find_tool_format
from tests.support import on_ranks

DEMO = Path(__file__).parents[3] / "demo"
TOKENIZER = load_tokenizer(DEMO / "tokenizer.model")
VOCABULARY = partial(grammar_vocabulary, TOKENIZER, TOKENIZER.stop_ids)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["animal", "plant"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}
HERMES = AnswerFormat(TOKENIZER, find_tool_format("hermes"), marks=None)


def wanted(grammar: str) -> str:
    return answer_grammar(HERMES, grammar, "field")


OBJECT = wanted(json_schema_grammar(SCHEMA))


def request(text: str, seed: int, grammar: str = "") -> tuple[list[int], SamplingParams]:
    params = SamplingParams(1.0, 1.0, seed=seed, max_tokens=90, logprobs=0, grammar=grammar)
    return TOKENIZER.encode(text, bos=True, eos=False), params


def mixed() -> list[tuple[list[int], SamplingParams]]:
    texts = ("Tell me of a", "Once upon a time", "The cat", "A plant is", "Write JSON:", "What is")
    return [request(text, seed, OBJECT if seed % 2 else "") for seed, text in enumerate(texts)]


def serve(requests: list[tuple[list[int], SamplingParams]], **options: Any) -> dict[str, Any]:
    return on_ranks.serve(alone("cpu"), str(DEMO), requests, **options)


@pytest.mark.parametrize("backend", ["native", "torch", "fused"])
def test_answers_follow_the_schema_beside_rows_without_one(backend: str) -> None:
    found = serve(mixed(), backend=backend)
    for i, output in enumerate(found["outputs"]):
        if i % 2:
            jsonschema.validate(json.loads(TOKENIZER.decode(output)), SCHEMA)
    assert found["errors"] == [None] * 6
    plain = serve([one for i, one in enumerate(mixed()) if i % 2 == 0], backend=backend)
    assert plain["outputs"] == found["outputs"][::2]
    if backend == "native":
        assert plain["logprobs"] == found["logprobs"][::2]


def test_all_backends_sample_the_same_tokens_whether_few_or_many_are_allowed() -> None:
    texts = ("[0-9]{1,20}", "(?s:.)+", "[^q]{2,40}", "(cat|dog|a tree)( and (cat|dog)){0,4}", "[a-m ]+")
    requests = []
    for seed in range(15):
        prompt, params = request("Say", seed, wanted(regex_grammar(texts[seed % 5])))
        how: dict[str, Any] = {"temperature": (0.0, 1.0, 1.4)[seed // 5], "top_p": (1.0, 0.8)[seed % 2]}
        requests.append(
            (prompt, replace(params, top_k=(0, 9, 400)[seed % 3], min_p=(0.0, 0.02)[seed % 2], max_tokens=24, **how))
        )
    found = [serve(requests, backend=backend)["outputs"] for backend in ("native", "torch", "fused")]
    assert found[0] == found[1] == found[2]
    assert sum(map(len, found[0])) > 100


def test_tokens_that_the_grammar_forces_are_drafted() -> None:
    letters = wanted(regex_grammar("(a|b)the quick brown fox jumps over the lazy dog"))
    expected = serve([request("x", 3, letters)])
    drafted = serve([request("x", 3, letters)], max_drafts=8)
    assert drafted["outputs"] == expected["outputs"]
    assert drafted["drafts_accepted"] > len(expected["outputs"][0]) // 2


def test_a_grammar_that_cannot_be_followed_refuses_its_row_and_no_other() -> None:
    expected = serve([request("The cat", 1)])["outputs"][0]
    found = serve([request("The cat", 1), request("The cat", 2, lark_grammar("start: missing"))])
    assert found["outputs"] == [expected, []]
    assert found["errors"][0] is None and "grammar" in found["errors"][1]


@pytest.mark.parametrize("common", ["", "key_"], ids=["keys that differ at once", "keys whose first tokens are forced"])
def test_masks_after_refused_drafts_are_those_of_the_tokens_that_were_sampled(common: str) -> None:
    """A matcher that takes tokens back keeps the mask after them, which it takes for that of as many other tokens."""
    names = [common + name for name in ("stone", "cat", "red")]
    parts = dict(zip(names, ({"type": "boolean"}, {"type": "integer"}, {"enum": ["blue", "dog"]}), strict=True))
    schema = json.dumps({"type": "object", "properties": parts, "additionalProperties": False})
    grammar = answer_grammar(HERMES, "", "", ToolUse((Tool("f", None, schema),), "required"))
    vocabulary = VOCABULARY()
    begin = vocabulary.tokenize_str('<tool_call>{"name": "f", "arguments": {"')
    keys = [vocabulary.tokenize_str(f'{key}":') for key in parts]

    def masks(*drafts: list[int]) -> list[list[int]]:
        """After each key, and after drafts that are refused."""
        found, slots = [], SlotGrammars(lambda: vocabulary, TOKENIZER.n_words, 1)
        for key in keys:
            params = SamplingParams(grammar=grammar, max_tokens=4000)
            slots.admit(SlotInit(0, [1, *begin], [], params, prompt_length=1))
            start, last = 1 + len(begin), []
            for number, draft in enumerate([*drafts, *([] for _ in range(len(key) + 1 - len(drafts)))]):
                # The first token of the key is sampled in the place of the draft's, then one in each step.
                if draft:
                    slots.propose(Draft(0, start, draft))
                computed = slots.begin([Row(0, start + number - 1, 1 + len(draft), True, len(draft))])
                assert computed is not None
                computed.wait()
                assert computed.reasons == {}
                slots.follow(computed, partial(list, [*key[number : number + 1], *draft]))
                last = computed.bits[-1].tolist()
            found.append(last)
        slots.close()
        return found

    expected = masks()
    assert expected[0] != expected[1] != expected[2]
    for draft in keys:
        assert masks(draft) == expected


# What rank 0 keeps of grammars for later answers is bounded, and is made once.


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


# A rank that waits for the mask of a grammar does not compute: the time counts as waited, not as sampling.


MASK_S = 0.5  # longer than all else that a step does


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_time_of_a_late_mask_is_waited(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    match = SlotGrammars._match

    def slow(self: SlotGrammars, *args: Any) -> Any:
        time.sleep(MASK_S)
        return match(self, *args)

    monkeypatch.setattr(SlotGrammars, "_match", slow)
    runner = on_ranks.new_runner(alone("cpu"), str(DEMO), backend=backend)
    params = SamplingParams(grammar=regex_grammar("[a-z]+"), max_tokens=9)
    prompt = TOKENIZER.encode("Tell", bos=True, eos=False)
    init = SlotInit(0, prompt, [0], params)
    waited, sampled = runner.seconds_waited(), runner.seconds_sampled()
    assert waited is not None and sampled is not None
    output = runner.step(StepInput(0, 1, rows=[Row(0, 0, len(prompt), True)], admit=[init]))
    assert output.mask_wait_ms is not None and 0 < output.mask_wait_ms < output.elapsed_ms
    now_waited, now_sampled = runner.seconds_waited(), runner.seconds_sampled()
    assert now_waited is not None and now_sampled is not None
    assert now_waited - waited > now_sampled - sampled
