"""Streamed text equals decoded text for any division into pushes, and no part of a stop string is emitted."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.errors import InvalidParameter
from llama_core.text.detokenizer import IncrementalDetokenizer, StopChecker
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizers.tokenizer import Tokenizer

GOLDEN = load_tokenizer(Path(__file__).parents[2] / "data" / "golden" / "mp1" / "tokenizer.model")


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, with more bytes, incomplete characters, control tokens and leading spaces than random ids would have."""
    first_byte_id = 3  # after <unk>, BOS and EOS
    byte_ids = range(first_byte_id, first_byte_id + 256)
    assert [tokenizer.token_bytes(i) for i in byte_ids] == [bytes([b]) for b in range(256)]
    spaces = [i for i in range(tokenizer.n_words) if tokenizer.leads_with_space(i)]
    spaces.sort(key=lambda i: len(tokenizer.token_bytes(i)))  # a bare space first
    any_id = st.integers(0, tokenizer.n_words - 1)
    lead_and_trail_bytes = [0x0A, 0x20, 0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC2, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF]
    part = st.one_of(
        any_id.map(lambda i: [i]),
        st.sampled_from([0, 1, 2]).map(lambda i: [i]),
        st.sampled_from(spaces[:4]).map(lambda i: [i]),
        st.sampled_from(lead_and_trail_bytes).map(lambda b: [byte_ids[b]]),
        st.binary(max_size=5).map(lambda data: [byte_ids[b] for b in data]),
        st.text(max_size=3).map(lambda text: [byte_ids[b] for b in text.encode()]),
    )
    return st.lists(part, max_size=12).map(lambda parts: [i for part in parts for i in part])


def cut(items: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(c % (len(items) + 1) for c in cuts), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


@given(ids_of(GOLDEN), st.lists(st.integers(0, 99), max_size=6))
def test_streamed_text_equals_text_decoded_whole(ids: list[int], cuts: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(GOLDEN)
    streamed = "".join(detokenizer.push(part) for part in cut(ids, cuts))
    assert streamed + detokenizer.flush() == GOLDEN.decode(ids)


@given(ids_of(GOLDEN), ids_of(GOLDEN))
def test_a_detokenizer_with_a_prefix_continues_its_text(prefix: list[int], ids: list[int]) -> None:
    whole = IncrementalDetokenizer(GOLDEN)
    already_read = whole.push(prefix)
    resumed = IncrementalDetokenizer(GOLDEN, prefix=prefix)
    rest = resumed.push(ids) + resumed.flush()
    assert rest == whole.push(ids) + whole.flush()
    assert already_read + rest == GOLDEN.decode(prefix + ids)


# Stop strings


def first_stop(text: str, stops: list[str], num_text: int = 0) -> tuple[str, str | None]:
    """By definition: the stop string that is complete first (the longest of those that end there), and the text before it.
    num_text: those that end in so many characters are text."""
    for end in range(num_text + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


small_text = st.text(alphabet="ab", max_size=30)
small_stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


@given(small_text, small_stops, st.lists(st.integers(0, 99), max_size=8))
def test_stopping_does_not_depend_on_the_division_into_pushes(text: str, stops: list[str], cuts: list[int]) -> None:
    checker, emitted, stopped = StopChecker(stops), "", False
    for part in cut(list(map(ord, text)), cuts):
        check = checker.push("".join(map(chr, part)))
        emitted, stopped = emitted + check.emit, check.stopped
    emitted += checker.flush()
    assert (emitted, checker.matched) == first_stop(text, stops)
    assert stopped == (checker.matched is not None)


@given(small_text, small_stops, st.integers(0, 30))
def test_stop_strings_that_end_in_a_text_that_may_not_stop_are_passed_through(
    text: str, stops: list[str], num_text: int
) -> None:
    checker, emitted = StopChecker(stops), ""
    for end, char in enumerate(text, start=1):
        emitted += checker.push(char, may_stop=end > num_text).emit
    assert (emitted + checker.flush(), checker.matched) == first_stop(text, stops, num_text)


@given(small_text, small_stops)
def test_only_a_prefix_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    checker, emitted = StopChecker(stops), ""
    before_stop, _ = first_stop(text, stops)
    for end, char in enumerate(text, start=1):
        check = checker.push(char)
        emitted += check.emit
        assert before_stop.startswith(emitted)
        if check.stopped:
            assert emitted == before_stop
            break
        held = text[len(emitted) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        longer = [text[i:end] for i in range(len(emitted))]
        assert not any(stop.startswith(tail) for tail in longer for stop in stops)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [1], "stop"])
def test_empty_or_ill_typed_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidParameter, match="at least 1 character"):
        StopChecker(stops)


def test_near_misses_of_a_stop_string_take_linear_time() -> None:
    checker = StopChecker(["a" * 5000 + "b"])  # a search that restarts at each character would take hours
    emitted = sum(len(checker.push("a" * 1000).emit) for _ in range(1000))
    assert emitted + len(checker.flush()) == 1_000_000
