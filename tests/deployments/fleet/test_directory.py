"""Calls to all replicas of a deployment."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cluster.wire.tls import GroupKey
from deployments.fleet import directory
from deployments.fleet.invitation import Invitation


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
    assert await directory._call("demo", directory.ENGINE, "invitation") == ["an invitation"]


@pytest.mark.parametrize("answers", [[None, "", "it is refused"], [None, ""], []])  # None: of the former release
async def test_an_engine_learns_why_a_front_refuses_it(
    monkeypatch: pytest.MonkeyPatch, answers: list[str | None]
) -> None:
    async def call_all(*args: object) -> list[str | None]:
        return answers

    monkeypatch.setattr(directory, "call_all", call_all)
    invitation = Invitation("e", "m", "n", "/p", "h", 7, b"s", GroupKey("certificate", "key"))
    assert await directory.invite(invitation) == ("it is refused" if "it is refused" in answers else "")
