"""The section that tries tiles of products inside a decode step; a GPU runs it as a whole."""

import pytest
import torch

from benchmarks.gpu.sections.tiles import CANDIDATES, TriedTiles
from llama_core.execution.weight_formats.format import HeldWeights

pytest.importorskip("triton")

OUTPUTS = {"gated": 22_016, "many": 12_288, "few": 4_096}
CASES = [(rows, kind) for rows, kinds in CANDIDATES.items() for kind in kinds]


def weights(kind: str) -> HeldWeights:
    return HeldWeights(torch.empty((OUTPUTS[kind], 4_096), dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize(("rows", "kind"), CASES)
def test_the_chosen_tiles_are_among_the_candidates(rows: int, kind: str) -> None:
    choice, texts = TriedTiles(), CANDIDATES[rows][kind]
    chosen = choice(weights(kind), rows, torch.bfloat16, kind == "gated")
    tried = []
    for text in texts:
        choice.try_tiles(kind, text)
        tried.append(choice(weights(kind), rows, torch.bfloat16, kind == "gated"))
    assert chosen in tried and len(set(tried)) == len(texts)
    # A program has tiles for all rows of the step: the GPU would read the weights several times otherwise.
    assert all(tiles.rows >= rows for tiles in tried)


def test_only_one_kind_of_products_has_other_tiles() -> None:
    choice = TriedTiles()
    before = {kind: choice(weights(kind), 64, torch.bfloat16, kind == "gated") for kind in OUTPUTS}
    choice.try_tiles("many", "64 16 32 2 4 128")
    after = {kind: choice(weights(kind), 64, torch.bfloat16, kind == "gated") for kind in OUTPUTS}
    assert {kind for kind in OUTPUTS if before[kind] != after[kind]} == {"many"}
