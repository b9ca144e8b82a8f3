"""The reference's own outputs, and the equalities that everything else rests on: ranks, shards, chunks, batches, the cache."""

import random
from typing import Any

import pytest

from llama_core.parallel import alone
from llama_core.request import SamplingParams
from tests.conftest import GOLDEN
from tests.llama_core import on_ranks

MP1, MP2 = str(GOLDEN / "mp1"), str(GOLDEN / "mp2")


@pytest.fixture(params=[1, 2, 4], ids=["1 rank", "2 ranks", "4 ranks"])
def world_size(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


def on(ranks: Any, world_size: int, function: Any, *args: Any, **kwargs: Any) -> Any:
    """The result that every rank agrees on (rank 0's)."""
    if world_size == 1:
        return function(alone("cpu"), *args)
    return ranks(world_size).call(function, *args)[0]


@pytest.mark.parametrize("ckpt_dir", [MP1, MP2], ids=["1 shard", "2 shards"])
@pytest.mark.parametrize("num_ranks", [1, 2], ids=["1 rank", "2 ranks"])
def test_every_golden_case_token_for_token(ranks: Any, golden: dict[str, Any], num_ranks: int, ckpt_dir: str) -> None:
    got = on(ranks, num_ranks, on_ranks.golden_outputs, ckpt_dir, golden)
    for (tokens, logprobs), texts, case in zip(got["completions"], got["texts"], golden["completions"], strict=True):
        assert tokens == case["out_tokens"]
        for mine, theirs in zip(logprobs or [], case["out_logprobs"] or [], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
        for mine, theirs in zip(texts, case["text_completion"], strict=True):
            assert mine["generation"] == theirs["generation"]
            assert mine.get("tokens") == theirs.get("tokens")
    for predictions, case in zip(got["chats"], golden["chats"], strict=True):
        for mine, theirs in zip(predictions, case["chat_completion"], strict=True):
            assert mine["generation"] == theirs["generation"]
            if not mine["generation"]["content"].startswith("Error: special tags"):
                assert mine["tokens"] == theirs["tokens"]
                assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)


def test_golden_logits_within_1e_4(ranks: Any, golden: dict[str, Any], world_size: int) -> None:
    for case in golden["logits"]:
        ckpt = MP1 if world_size != 2 else MP2
        if world_size == 4:
            pytest.skip("the golden model has 2 key/value heads: 4 ranks cannot share them")
        logits = on(ranks, world_size, on_ranks.last_logits, ckpt, case["tokens"], [len(case["tokens"])])
        assert [logits[i] for i in case["last_top16_ids"]] == pytest.approx(case["last_top16_logits"], abs=1e-4)
        assert sum(logits) / len(logits) == pytest.approx(case["last_mean"], abs=1e-4)
