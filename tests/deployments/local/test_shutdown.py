"""How `llama-ray up` notices that Ray has ended; `tests/servers/` ends real servers."""

import signal
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from deployments.local.shutdown import Shutdown, _gcs_address, _is_refused


def test_an_address_is_refused_only_where_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert not _is_refused(f"127.0.0.1:{port}")
    assert _is_refused(f"127.0.0.1:{port}")


@pytest.mark.parametrize("error", [TimeoutError(), socket.gaierror(), OSError("too many open files")])
def test_another_error_is_no_refusal(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    assert not _is_refused("127.0.0.1:1")


def test_without_a_connection_to_ray_there_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Ray is not connected")

    monkeypatch.setattr("ray.get_runtime_context", fail)
    assert _gcs_address() is None


def test_no_thread_is_left_to_take_the_disconnection_for_the_end_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.local.shutdown.has_raylet", lambda tag: True)
    monkeypatch.setattr("deployments.local.shutdown._gcs_address", lambda: None)
    monkeypatch.setattr(Shutdown, "_drain_and_end", lambda self: None)
    shutdown = Shutdown(Mock(owns_cluster=True, failure=None), Mock(), "tag", Path("/absent"), lambda: None)
    shutdown.on_signal(signal.SIGTERM, None)
    shutdown.finish()
    left = [thread.name for thread in shutdown._threads if thread.is_alive()]
    shutdown._is_over.set()  # a thread that is left would end this process
    assert len(shutdown._threads) == 2 and left == []
