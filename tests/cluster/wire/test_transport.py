"""A group accepts only connections with its secret, and leaves no socket."""

import asyncio
import dataclasses
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.wire import socket_dir
from cluster.wire.socket_dir import SocketDir, remove_stale
from cluster.wire.transport import Invitation, RankListener, connect

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(params=[None, "127.0.0.1"], ids=["unix", "tls"])
async def listener(request: pytest.FixtureRequest) -> AsyncIterator[RankListener]:
    made = RankListener(7, 2, request.param)
    yield made
    made.close()


async def try_connect(invitation: Invitation, rank: int) -> bool:
    """Whether the driver keeps the connection; it closes a refused one at once."""

    def attempt() -> bool:
        try:
            frames = connect(invitation, rank, 60)
            frames._socket.settimeout(60)
            return frames.receive() is not None
        except TimeoutError:
            return True
        except OSError:
            return False

    return await asyncio.to_thread(attempt)


async def test_ranks_with_the_invitation_are_connected_in_order(listener: RankListener) -> None:
    invitation = await listener.open()
    sockets = [await asyncio.to_thread(connect, invitation, rank, 60) for rank in (1, 0)]
    connections = await asyncio.wait_for(listener.connections(), 60)
    assert [connection.rank for connection in connections] == [0, 1]
    connections[0].write(b"\0\0\0\1x")
    assert await asyncio.to_thread(sockets[1].receive) == b"x"


async def test_another_secret_epoch_or_rank_is_refused(listener: RankListener) -> None:
    invitation = await listener.open()
    for changes in ({"secret": bytes(32)}, {"secret": b""}, {"epoch": 6}):
        assert not await try_connect(dataclasses.replace(invitation, **changes), 0)
    assert not listener.unproven
    kept = await asyncio.to_thread(connect, invitation, 0, 60)
    for rank in (0, 2, -1):
        assert not await try_connect(invitation, rank)
    kept.close()


async def test_a_connection_without_a_hello_cannot_fill_the_drivers_memory() -> None:
    listener = RankListener(7, 1, None)
    invitation = await listener.open()

    def flood() -> bool:
        with socket.socket(socket.AF_UNIX) as stranger:
            assert invitation.path is not None
            stranger.settimeout(60)
            stranger.connect(invitation.path)
            stranger.sendall((2**20).to_bytes(4, "big"))
            return stranger.recv(1) == b""

    assert await asyncio.to_thread(flood)
    listener.close()


async def test_the_socket_is_private_and_removed_once_all_ranks_are_connected() -> None:
    listener = RankListener(7, 1, None)
    invitation = await listener.open()
    assert invitation.path is not None
    directory = Path(invitation.path).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    connection = await asyncio.to_thread(connect, invitation, 0, 60)
    await listener.connections()
    assert not directory.exists()
    assert not await try_connect(invitation, 0)
    connection.close()
    listener.close()


def test_directories_of_dead_processes_are_removed_and_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_dir, "parent_dir", lambda: tmp_path)
    living = SocketDir()
    code = (
        "import os, pathlib; from cluster.wire import socket_dir; "
        f"socket_dir.parent_dir = lambda: pathlib.Path({str(tmp_path)!r}); d = socket_dir.SocketDir(); "
        "open(d.socket_path, 'w').close(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False)
    assert len(list(tmp_path.iterdir())) == 2
    assert remove_stale(tmp_path) == 1
    assert list(tmp_path.iterdir()) == [living.path]
    living.remove()
    living.remove()
    assert not list(tmp_path.iterdir())
