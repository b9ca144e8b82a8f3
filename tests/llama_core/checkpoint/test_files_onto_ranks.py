"""The short form of the program that loads N files on M ranks."""

from tests.programs import files_onto_ranks


def test_three_files_load_on_any_number_of_ranks_with_equal_values() -> None:
    assert files_onto_ranks.run(("smollm2", "qwen3"), (1, 3, 8)) == 0
