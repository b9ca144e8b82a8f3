"""Times, limit and errors of the transformers peer, on a fake of its manager."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.workload import Request
from benchmarks.peers.hf_continuous import ContinuousBatching


class FakeManager:
    """Finishes one request a call of `get_result`, or none if it hangs. error: of every result."""

    def __init__(self, *, hangs: bool = False, refuses: bool = False, error: str | None = None) -> None:
        self.waiting: list[tuple[str, int]] = []
        self.cancelled: list[str] = []
        self.num_added = 0
        self._hangs, self._refuses, self._error = hangs, refuses, error

    def add_request(self, prompt: list[int], *, max_new_tokens: int, eos_token_id: int) -> str | None:
        if self._refuses:
            return None
        name, self.num_added = f"req_{self.num_added}", self.num_added + 1
        self.waiting.append((name, max_new_tokens))
        return name

    def get_result(self, timeout: float) -> Any:
        if self._hangs:
            return None
        time.sleep(0.002)
        name, count = self.waiting.pop()
        is_finished = self._error is None
        result = SimpleNamespace(request_id=name, error=self._error, generated_tokens=[0] * count)
        return SimpleNamespace(**vars(result), is_finished=lambda: is_finished)

    def cancel_request(self, name: str) -> None:
        self.cancelled.append(name)

    def is_running(self) -> bool:
        return True


REQUESTS = [Request([1, 2, 3], 4) for _ in range(20)]


def peer_on(manager: FakeManager) -> ContinuousBatching:
    peer = ContinuousBatching.__new__(ContinuousBatching)  # without a model
    vars(peer)["_manager"] = manager
    return peer


def test_a_whole_batch_takes_the_time_of_its_last_result() -> None:
    manager = FakeManager()
    peer = peer_on(manager)
    seconds = peer.seconds(REQUESTS, 60.0)
    assert seconds is not None and seconds >= 20 * 0.002
    assert not manager.cancelled and peer.num_finished == len(REQUESTS)


@pytest.mark.parametrize("hangs", [False, True], ids=["results come often", "no result comes"])
def test_the_limit_ends_a_batch_and_cancels_what_still_runs(hangs: bool) -> None:
    manager = FakeManager(hangs=hangs)
    peer = peer_on(manager)
    assert peer.seconds(REQUESTS, 0.01) is None and peer.num_finished == manager.num_added - len(manager.waiting)
    assert sorted(manager.cancelled) == sorted(name for name, _ in manager.waiting)
    assert manager.cancelled


def test_a_refused_request_fails_the_batch() -> None:
    """transformers refuses requests while its thread stops."""
    with pytest.raises(RuntimeError, match="takes no further requests"):
        peer_on(FakeManager(refuses=True)).seconds(REQUESTS)


def test_a_failed_request_fails_the_batch() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        peer_on(FakeManager(error="out of memory")).seconds(REQUESTS)
