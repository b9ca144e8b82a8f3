"""The store in which ranks of several nodes meet."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from cluster.rank.call_store import CallStore
from cluster.wire.collective_errors import is_collective
from cluster.wire.rank_runner import Keys


def store_of(keys: Keys) -> CallStore:
    return CallStore(lambda method, *arguments: getattr(keys, method)(*arguments))


def test_ranks_that_meet_in_it_compute_together() -> None:
    keys = Keys()

    def total(rank: int) -> list[float]:
        store = store_of(keys)
        group = ProcessGroupGloo(store, rank, 3, timedelta(seconds=30))
        values: Any = torch.full((2,), 10.0**rank)
        group.allreduce([values]).wait()  # type: ignore[attr-defined]
        return list(values.tolist())

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(total, range(3))) == [[111.0, 111.0]] * 3


def test_numbers_add_up_and_a_key_that_nobody_sets_is_named() -> None:
    store = store_of(Keys())
    assert [store.add("count", 2), store.add("count", 3), store.get("count")] == [2, 5, b"5"]
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(dist.DistStoreError, match="no rank has set one, two"):
        store.wait(["one", "two"])
    with pytest.raises(dist.DistStoreError, match="no rank has set one"):
        store.get("one")


def test_a_rank_0_that_does_not_answer_is_an_error_between_ranks() -> None:
    def call(method: str, *_: Any) -> None:
        raise ConnectionError("rank 0 does not answer")

    store = CallStore(call)
    with pytest.raises(dist.DistStoreError, match="rank 0 does not answer") as raised:
        ProcessGroupGloo(store, 0, 2, timedelta(seconds=5))
    assert is_collective(raised.value)
