"""Each family's small random model, written by transformers: its greedy tokens, and its logits within 1e-4 in float32.

`python -m tests.programs.families` runs every family on every backend and number of ranks, and in Triton's interpreter.
"""

from pathlib import Path
from typing import Any

import pytest

from llama_core.backends.parallel import alone
from tests.llama_core.backends.test_switches import TOLERANCE, differing_ways
from tests.support import families
from tests.support.full_runs import with_full_ones
from tests.support.hugging_face import read


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, families.Expected]]:
    """The folder of each family's model, and what transformers generates from it."""
    root: Path = tmp_path_factory.mktemp("families")
    return {name: (str(root / name), families.write(root / name, name)) for name in families.FAMILIES}


@pytest.mark.parametrize(
    ("world_size", "backend"),
    with_full_ones(
        [(world_size, backend) for world_size in (1, 2, 3) for backend in ("native", "torch")],
        in_each_run=[(1, "native"), (1, "torch"), (3, "native"), (2, "torch"), (3, "torch")],
    ),
)
def test_tokens_and_logits_are_those_of_transformers(
    ranks: Any, models: dict[str, tuple[str, families.Expected]], world_size: int, backend: str
) -> None:
    names = families.FAMILIES if world_size == 1 else families.DISTINCT
    for name in names:
        directory, expected = models[name]
        if world_size == 1:
            results = [families.run(alone("cpu"), directory, backend)]
        else:
            results = ranks(world_size).call(families.run, directory, backend)
        for got in results:
            assert families.difference(got, expected) < 1e-4, name


# Their frequencies depend on the length of the text.
LONG_ONES = [name for name in families.FAMILIES if name != "llama-dynamic"]


@pytest.mark.parametrize(
    ("name", "seed"),
    with_full_ones(
        [(name, seed) for name in LONG_ONES for seed in range(3)], [(name, 0) for name in families.DISTINCT]
    ),
)
def test_200_tokens_are_those_of_transformers_on_any_number_of_ranks(
    ranks: Any, tmp_path: Path, name: str, seed: int
) -> None:
    model = families.new_model(tmp_path / name, name, seed=seed)
    how = str(tmp_path / name), "native", families.LONG, 320
    for got in (families.run(alone("cpu"), *how), *(ranks(size).call(families.run, *how)[0] for size in (2, 3))):
        assert families.logits_error(model, got) < 3e-4


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", families.DISTINCT)
def test_bits_do_not_depend_on_how_a_familys_tokens_are_computed(dtype: str, name: str) -> None:
    assert differing_ways(read(families.FAMILIES[name]), dtype=dtype) == []
