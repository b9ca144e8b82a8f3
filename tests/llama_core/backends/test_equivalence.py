"""The reference's outputs, and equivalences: any ranks, shards, chunks, batches and cache give the same tokens."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from llama_core.backends.parallel import alone
from tests.conftest import GOLDEN
from tests.support import checkpoints, on_ranks
from tests.support.simulated_steps import Requests, requests_of

MP1, MP2 = str(GOLDEN / "mp1"), str(GOLDEN / "mp2")


@pytest.fixture(params=[1, 2, pytest.param(4, marks=pytest.mark.full)], ids=["1 rank", "2 ranks", "4 ranks"])
def world_size(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


BACKENDS = ("native", "torch")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend must agree with the reference."""
    name: str = request.param
    return name


def on(ranks: Any, world_size: int, function: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of rank 0; for one rank, computed in this process."""
    if world_size == 1:
        return function(alone("cpu"), *args, **kwargs)
    return ranks(world_size).call(partial(function, **kwargs), *args)[0]


def golden_runs() -> Iterator[Any]:
    """Number of ranks, checkpoint and backend."""
    for backend in BACKENDS:
        for num_ranks, ckpt_dir, name, in_each_run in (
            (1, MP1, "1 rank-1 shard", ()),
            (1, MP2, "1 rank-2 shards", BACKENDS),
            (2, MP1, "2 ranks-1 shard", BACKENDS),
            (2, MP2, "2 ranks-2 shards", ()),
        ):
            marks = [] if backend in in_each_run else [pytest.mark.full]
            yield pytest.param(num_ranks, ckpt_dir, backend, id=f"{backend}-{name}", marks=marks)


@pytest.mark.parametrize(("num_ranks", "ckpt_dir", "backend"), golden_runs())
def test_every_golden_case_has_the_reference_tokens(
    ranks: Any, golden: dict[str, Any], num_ranks: int, ckpt_dir: str, backend: str
) -> None:
    got = on(ranks, num_ranks, on_ranks.golden_outputs, ckpt_dir, backend, golden)
    assert (got["model"] == "FairscaleTransformer") == ((num_ranks, backend) == (2, "torch"))
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


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model in 2 shards. 1, 2 and 4 ranks can divide its 4 key/value heads."""
    directory = tmp_path_factory.mktemp("wide")
    return str(checkpoints.write(directory, checkpoints.split(checkpoints.random_weights(checkpoints.WIDE), 2)))


def requests_of_every_kind(count: int = 12) -> Requests:
    """Greedy and seeded requests that differ in length and in every sampling parameter."""
    return [
        (prompt[:60], replace(params, logprobs=0, max_tokens=9 + params.max_tokens))
        for prompt, params in requests_of(7, count)
    ]


@pytest.fixture(scope="module")
def alone_one_by_one(wide: str) -> dict[str, Any]:
    """The expected results: each request alone on one rank, with its prompt in one chunk."""
    runs = [on_ranks.serve(alone("cpu"), wide, [request], max_step_tokens=160) for request in requests_of_every_kind()]
    assert len({tuple(run["outputs"][0]) for run in runs}) == len(runs), "equal outputs would show little"
    return {"outputs": [run["outputs"][0] for run in runs], "logprobs": [run["logprobs"][0] for run in runs]}


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["outputs"] == expected["outputs"]
    for mine, theirs in zip(got["logprobs"], expected["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert got["blocks_used"] == 0


@pytest.mark.parametrize(
    "budget",
    [8, pytest.param(17, marks=pytest.mark.full), pytest.param(64, marks=pytest.mark.full)],
    ids=lambda budget: f"{budget} tokens a step",
)
def test_batched_with_others_and_prefilled_in_chunks_equals_alone(
    ranks: Any, wide: str, world_size: int, budget: int, backend: str, alone_one_by_one: dict[str, Any]
) -> None:
    requests = requests_of_every_kind()
    arrivals = [3 * i % 11 for i in range(len(requests))]
    serve = partial(on_ranks.serve, max_step_tokens=budget, arrivals=arrivals, backend=backend)
    if world_size == 1:
        assert_same(serve(alone("cpu"), wide, requests), alone_one_by_one)
        return
    for got in ranks(world_size).call(serve, wide, requests):  # every rank has the tokens that rank 0 sampled
        assert_same(got, alone_one_by_one)
