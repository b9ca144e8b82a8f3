"""Each family's small random model, written by transformers: its greedy tokens, and its logits within 1e-4 in float32.

`python -m tests.programs.families` runs every family on every backend and number of ranks, and in Triton's interpreter.
"""

from pathlib import Path
from typing import Any

import pytest

from llama_core.backends.parallel import alone
from tests.support import families
from tests.support.full_runs import with_full_ones


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
