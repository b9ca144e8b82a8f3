"""Calls to all replicas of a deployment."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from deployments.fleet import directory
from deployments.fleet.cluster import ENGINE


class Call:
    """What Serve has of the call of one replica."""

    def __init__(self, get: Callable[[], Coroutine[Any, Any, str]]) -> None:
        self.get_async = get


class Handle:
    """As Serve's handle and its response. calls: one a replica."""

    def __init__(self, *calls: Call) -> None:
        self._calls = list(calls)

    def broadcast(self, method: str) -> "Handle":
        return self

    async def _fetch_replica_results_async(self) -> list[Call]:
        return self._calls


async def hang() -> str:
    await asyncio.Event().wait()
    return ""


async def fail() -> str:
    raise RuntimeError("the replica has died")


async def answer() -> str:
    return "an invitation"


async def test_a_replica_that_hangs_or_dies_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "CALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(directory, "_handle", lambda *names: Handle(Call(hang), Call(fail), Call(answer)))
    assert await directory._call("demo", ENGINE, "invitation") == ["an invitation"]
