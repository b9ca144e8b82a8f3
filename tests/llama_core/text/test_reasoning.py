"""Reasoning is separated from the answer, with the number of its tokens, however the stream is divided."""

import random

import pytest

from llama_core.text.reasoning import ReasoningCounter, ReasoningSplitter, reasons
from llama_core.text.registry import load_tokenizer
from tests.conftest import GOLDEN
from tests.support.tool_calls import parts

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


def split(text: list[str], begun: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(begun=begun)
    found = [*(splitter.push(part) for part in text), splitter.finish()]
    return "".join(each.reasoning for each in found), "".join(each.answer for each in found)


@pytest.mark.parametrize(("text", "begun", "reasoning", "answer"), CASES)
def test_reasoning_and_answer_are_separated_in_any_division(
    text: str, begun: bool, reasoning: str, answer: str
) -> None:
    rng = random.Random(text)
    assert split([text], begun) == (reasoning, answer)
    assert split(list(text), begun) == (reasoning, answer)
    for _ in range(50):
        assert split(parts(rng, text), begun) == (reasoning, answer)


@pytest.mark.parametrize(("text", "begun", "reasoning", "answer"), CASES)
def test_the_tokens_of_the_reasoning_are_counted_exactly(text: str, begun: bool, reasoning: str, answer: str) -> None:
    tokenizer = load_tokenizer(GOLDEN / "mp1" / "tokenizer.model")
    ids = tokenizer.encode(text, bos=False, eos=False)
    at_once = ReasoningCounter(tokenizer, begun=begun)
    at_once.push(ids)
    one_by_one = ReasoningCounter(tokenizer, begun=begun)
    for token in ids:
        one_by_one.push([token])
    assert at_once.num_tokens == one_by_one.num_tokens
    reasoned = "" if answer == text else text[: text.find("</think>") + len("</think>")] if "</think>" in text else text
    least = next(n for n in range(len(ids) + 1) if len(tokenizer.decode(ids[:n])) >= len(reasoned))
    assert at_once.num_tokens == (least if reasoned else 0)


def test_a_model_reasons_if_its_template_or_its_vocabulary_says_so() -> None:
    assert reasons("{{ '</think>' }}", lambda text: False)
    assert reasons(None, lambda text: True)
    assert not reasons("{{ messages }}", lambda text: False)
