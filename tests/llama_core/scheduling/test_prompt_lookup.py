"""Prompt lookup and the policy of speculation: the proposed drafts, and when they are worthwhile."""

import random

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


def test_a_match_of_three_tokens_is_preferred_to_one_of_two() -> None:
    assert PromptLookup().propose([1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3], 1) == [40]
    assert PromptLookup().propose([1, 2, 3, 40, 9, 2, 3, 50, 7, 2, 3], 1) == [50]


def test_a_loop_is_drafted_to_continue() -> None:
    assert PromptLookup().propose([5, 6, 7, 5, 6, 7, 5], 8) == [6, 7, 5, 6, 7, 5, 6, 7]
    assert PromptLookup().propose([9, 9, 9], 4) == [9, 9, 9, 9]


def test_no_draft_is_proposed_for_a_text_that_never_repeats() -> None:
    lookup = PromptLookup()
    assert all(lookup.propose(list(range(n)), 3) == [] for n in range(30))


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


def test_no_draft_beyond_the_point_where_acceptance_is_unlikely() -> None:
    draw = random.Random(1)
    drafting = new_drafting()
    for _ in range(200):
        drafting.observe(draw.randrange(4), draw.randrange(2))
        counts = [drafting.num_worthwhile(limit, PRICE_ALONE) for limit in range(9)]
        assert all(count <= limit for limit, count in enumerate(counts))
        best = max(counts)
        assert best == 0 or drafting.acceptance**best > 0.1
        assert all(count in (0, min(best, limit)) for limit, count in enumerate(counts))


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1))), st.integers(0, 7))
def test_beside_other_sequences_drafting_must_gain_more_to_be_worthwhile(
    seen: list[tuple[int, int]], limit: int
) -> None:
    drafting = new_drafting()
    for num_accepted, num_rejected in seen:
        drafting.observe(num_accepted, num_rejected)
    assert drafting.num_worthwhile(limit, PRICE_BESIDE_OTHERS) in (0, drafting.num_worthwhile(limit, PRICE_ALONE))
