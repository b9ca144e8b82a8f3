"""Reasoning is separated from the answer, with the number of its tokens, however the stream is divided."""

import random

import pytest

from llama_core.text.reasoning import KINDS, Marks, ReasoningCounter, find_marks, open_splitter
from llama_core.text.registry import load_tokenizer
from tests.conftest import GOLDEN
from tests.support.tool_calls import parts

TOKENIZER = load_tokenizer(GOLDEN / "mp1" / "tokenizer.model")
THINK, BRACKETS, HARMONY = KINDS
A, F, C = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
CALLED = "<|channel|>commentary to=functions.f<|message|>{}"

CASES = [
    ("<think>\nHm, 2 < 3.\n</think>\n\nYes.", False, "Hm, 2 < 3.", "Yes."),
    ("\nHm.\n\nSo </thin.\n</think>Yes.", True, "Hm.\n\nSo </thin.", "Yes."),
    ("No <think> at the beginning</think>", False, "", "No <think> at the beginning</think>"),
    ("<think>\n\n</think>\n\nYes. ", False, "", "Yes. "),
    ("<think>It never ends </th", False, "It never ends </th", ""),
    ("  <thin", False, "", "  <thin"),
    ("</think>", True, "", ""),
    ("a</think>b</think>", True, "a", "b</think>"),
    ("", False, "", ""),
]


# In messages: text, begun, reasoning, answer, and the text up to the end of the reasoning.
MESSAGES = [
    (f"{A}Hm.{NEXT}{F}Yes. <|return|>", False, "Hm.", "Yes. ", f"{A}Hm.<|end|>"),
    (f"{A}\nHm.\n{NEXT}{A} So.{NEXT}{F}Yes.", False, "Hm.\nSo.", "Yes.", f"{A}\nHm.\n{NEXT}{A} So.<|end|>"),
    (f"{F}At once.", False, "", "At once.", ""),
    (f"{C}I look.{NEXT}{F}It is so.", False, "", "I look.\nIt is so.", ""),
    (f"{A}Hm.{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}<|call|>", False, "Hm.", CALLED,
     f"{A}Hm.<|end|>"),
    (f"{A}Hm.{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>", False, "Hm.", CALLED, f"{A}Hm.<|end|>"),
    (" to=functions.f<|channel|>commentary json<|message|>{}", False, "", CALLED, ""),
    (f"{C}I look.{NEXT}<|channel|>commentary to=functions.f json<|message|>{{}}", False, "", "I look." + CALLED, ""),
    (f"Hm.{NEXT}{F}Yes.", True, "Hm.", "Yes.", "Hm.<|end|>"),
    (f"{A}Never en<|en", False, "Never en<|en", "", f"{A}Never en<|en"),
    (f"{A}Hm.{NEXT}<|channel|>fin", False, "Hm.", "", f"{A}Hm.<|end|>"),
    (" and so, <|end of it.", False, "", " and so, <|end of it.", ""),
    ("to=" + 300 * "x", False, "", "to=" + 300 * "x", ""),
    ("<|channel|>" + 245 * "x" + "<|message|>Yes.", False, "", "Yes.", ""),
    ("<|channel|>" + 246 * "x" + "<|message|>Yes.", False, "", "<|channel|>" + 246 * "x" + "<|message|>Yes.", ""),
    (f"{F}Yes.<|end|> ", False, "", "Yes.", ""),
    ("", False, "", "", ""),
]  # fmt: skip


def split(text: list[str], begun: bool, marks: Marks) -> tuple[str, str]:
    splitter = open_splitter(marks, begun=begun)
    found = [*(each for part in text for each in splitter.push(part)), splitter.finish()]
    return "".join(each.reasoning for each in found), "".join(each.answer for each in found)


def bracketed(text: str) -> str:
    return text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")


EVERY = [
    *((THINK, *case) for case in CASES),
    *(
        (BRACKETS, bracketed(text), begun, *map(bracketed, parts))
        for text, begun, *parts in CASES
        if "</th" not in parts[0]
    ),
    *((HARMONY, *case[:4]) for case in MESSAGES),
]


@pytest.mark.parametrize(("marks", "text", "begun", "reasoning", "answer"), EVERY)
def test_reasoning_and_answer_are_separated_in_any_division(
    marks: Marks, text: str, begun: bool, reasoning: str, answer: str
) -> None:
    rng = random.Random(text)
    assert split([text], begun, marks) == (reasoning, answer)
    assert split(list(text), begun, marks) == (reasoning, answer)
    for at in range(len(text)):
        assert split([text[:at], text[at:]], begun, marks) == (reasoning, answer)
    for _ in range(50):
        assert split(parts(rng, text), begun, marks) == (reasoning, answer)


def test_text_that_only_begins_as_a_header_is_not_held_back() -> None:
    splitter = open_splitter(HARMONY, begun=False)
    assert "".join(each.answer for each in splitter.push("to=" + 300 * "x")) == "to=" + 300 * "x"


def counted(marks: Marks, ids: list[int], begun: bool) -> int:
    at_once = ReasoningCounter(TOKENIZER, marks, begun=begun)
    at_once.push(ids)
    one_by_one = ReasoningCounter(TOKENIZER, marks, begun=begun)
    for token in ids:
        one_by_one.push([token])
    assert at_once.num_tokens == one_by_one.num_tokens
    return at_once.num_tokens


def least(ids: list[int], reasoned: str) -> int:
    """The fewest of the tokens whose text has `reasoned`."""
    return next(n for n in range(len(ids) + 1) if len(TOKENIZER.decode(ids[:n])) >= len(reasoned))


@pytest.mark.parametrize(("text", "begun", "reasoning", "answer"), CASES)
def test_the_tokens_of_the_reasoning_are_counted_exactly(text: str, begun: bool, reasoning: str, answer: str) -> None:
    ids = TOKENIZER.encode(text, bos=False, eos=False)
    reasoned = "" if answer == text else text[: text.find("</think>") + len("</think>")] if "</think>" in text else text
    assert counted(THINK, ids, begun) == (least(ids, reasoned) if reasoned else 0)


@pytest.mark.parametrize(("text", "begun", "reasoned"), [(case[0], case[1], case[4]) for case in MESSAGES])
def test_tokens_of_messages_of_reasoning_are_counted_with_their_headers(text: str, begun: bool, reasoned: str) -> None:
    ids = TOKENIZER.encode(text, bos=False, eos=False)
    assert counted(HARMONY, ids, begun) == (least(ids, reasoned) if reasoned else 0)


def test_a_model_reasons_if_its_template_or_its_vocabulary_says_so() -> None:
    assert find_marks("{{ '</think>' }}", lambda text: False) == THINK
    assert find_marks("{{ '[/THINK]' }}", lambda text: False) == BRACKETS
    assert find_marks(f"{{{{ '{F}' }}}}", lambda text: False) == HARMONY
    assert find_marks("{{ '<|end|>' }}", lambda text: text == "<|end|>") is None  # Phi's
    assert find_marks(None, lambda text: text in ("[THINK]", "[/THINK]")) == BRACKETS
    harmony = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    assert find_marks(None, harmony.__contains__) == HARMONY
    assert find_marks("{{ messages }}", lambda text: False) is None
