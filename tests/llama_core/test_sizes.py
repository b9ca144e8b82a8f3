"""Sizes as people write them."""

import pytest

from llama_core.sizes import format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *((" 65_536 ", 65536), ("8K", 8000), ("8Ki", 8192), ("512MB", 512 * 10**6), ("0.5Gi", 2**29), ("100B", 100)),
        *(("4GiB", 4 * 2**30), ("1.5k", 1500), ("2T", 2 * 10**12), ("7 MiB", 7 * 2**20)),
    ],
)
def test_a_size_with_its_unit(text: str, number: int) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize(
    "text", ["", "k", "8x", "8kk", "-1", "1.5", "1e3", "0x10", "8k 8k", "GiB", "1.0001k", "8i", "inf", "²"]
)
def test_what_is_no_whole_number_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ValueError, match="must be a whole number") as refused:
        parse_size(text)
    assert len(text) < 4 or text not in str(refused.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (4.2e9, "4.2 GB"), (3e15, "3000.0 TB")],
)
def test_bytes_are_shown_in_powers_of_a_thousand(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
