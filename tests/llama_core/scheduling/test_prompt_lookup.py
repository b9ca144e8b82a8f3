"""Prompt lookup and the policy of speculation: the proposed drafts, and when they are worthwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.scheduling.drafting import (
    MAX_DRAFTS_PER_ROW,
    PRICE_ALONE,
    PRICE_BESIDE_OTHERS,
    DraftPrice,
    new_drafting,
)
from llama_core.scheduling.prompt_lookup import NGRAMS, PromptLookup

tokens_of_few_kinds = st.lists(st.integers(0, 4), max_size=60)


def by_search(tokens: list[int], count: int) -> list[int]:
    """Drafts by a search of all tokens: those after the latest occurrence of the longest suffix."""
    for n in NGRAMS:
        for begin in range(len(tokens) - n - 1, -1, -1):
            if tokens[begin : begin + n] == tokens[len(tokens) - n :]:
                guess = tokens[begin + n :]
                while len(guess) < count:
                    guess = guess + guess
                return guess[:count]
    return []


@given(tokens_of_few_kinds, st.integers(1, 9))
def test_drafts_continue_the_latest_occurrence_of_the_suffix(tokens: list[int], count: int) -> None:
    assert PromptLookup().propose(tokens, count) == by_search(tokens, count)


@given(tokens_of_few_kinds, st.lists(st.integers(1, 9), max_size=20))
def test_an_index_that_grew_with_the_text_equals_one_made_at_once(tokens: list[int], pieces: list[int]) -> None:
    lookup, seen = PromptLookup(), list[int]()
    for piece in pieces:
        seen += tokens[len(seen) : len(seen) + piece]
        assert lookup.propose(seen, 5) == PromptLookup().propose(seen, 5)


@pytest.mark.parametrize(("price", "num_accepted"), [(PRICE_ALONE, 2), (PRICE_BESIDE_OTHERS, 6)])
def test_a_few_accepted_drafts_make_drafting_worthwhile_and_rejected_ones_end_it(
    price: DraftPrice, num_accepted: int
) -> None:
    drafting = new_drafting()
    for _ in range(3):
        assert drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, price) == 0, "a new sequence has no history"
        drafting.observe(num_accepted, 0)
        assert drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, price) > 1
        drafting.observe(20, 0)
        assert drafting.num_worthwhile(MAX_DRAFTS_PER_ROW, price) == MAX_DRAFTS_PER_ROW
        drafting.observe(0, 11)
