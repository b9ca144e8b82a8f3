"""Ranks whose nodes have IPv6 addresses only: interface and connection to the driver."""

import asyncio
import socket
import sys

import pytest

from cluster.rank.network_interface import interface_of
from cluster.wire.transport import RankListener, connect


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_interface_of_an_ipv6_address_is_found() -> None:
    assert interface_of("::1") == "lo"
    assert interface_of("0:0:0:0:0:0:0:1") == "lo"
    assert interface_of("2001:db8::1") is None


async def test_the_driver_listens_at_an_ipv6_address_with_tls() -> None:
    listener = RankListener(7, 1, "::1")
    frames = await asyncio.to_thread(connect, await listener.open(), 0, 60)
    (connection,) = await asyncio.wait_for(listener.connections(), 60)
    connection.write(b"\0\0\0\1x")
    assert await asyncio.to_thread(frames.receive) == b"x"
    frames.close()
    listener.close()
