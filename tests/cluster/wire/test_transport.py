"""Connections of ranks, without the hellos that `tests/fuzz/group_rules.py` sends; a group leaves no socket."""

import asyncio
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.wire import socket_dir
from cluster.wire.socket_dir import SocketDir, remove_stale
from cluster.wire.transport import RankListener, connect

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(params=[None, "127.0.0.1"], ids=["unix", "tls"])
async def listener(request: pytest.FixtureRequest) -> AsyncIterator[RankListener]:
    made = RankListener(7, 2, request.param)
    yield made
    made.close()


async def test_ranks_with_the_invitation_are_connected_in_order(listener: RankListener) -> None:
    invitation = await listener.open()
    sockets = [await asyncio.to_thread(connect, invitation, rank, 60) for rank in (1, 0)]
    connections = await asyncio.wait_for(listener.connections(), 60)
    assert [connection.rank for connection in connections] == [0, 1]
    connections[0].write(b"\0\0\0\1x")
    assert await asyncio.to_thread(sockets[1].receive) == b"x"


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
