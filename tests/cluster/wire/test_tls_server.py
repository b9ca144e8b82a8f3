"""Connections count before they have shaken hands, on asyncio's loop and on uvloop's."""

import asyncio
import ssl
from collections.abc import Callable

import pytest
import uvloop

from cluster.wire import tls
from cluster.wire.tls import make_group_key, tls_context

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
KEY = make_group_key()
NewLoop = Callable[[], asyncio.AbstractEventLoop]


class Echo(asyncio.Protocol):
    made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Echo.made += 1
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]


async def echoed(port: int, context: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(b"hello")  # in one packet with the handshake's last
    answer = await reader.readexactly(5)
    writer.close()
    return answer


@LOOPS
def test_connections_that_shake_hands_are_served_beside_those_that_never_do(
    new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "MAX_WAITING", 8)

    async def main() -> None:
        server = tls.TlsListener(Echo, "127.0.0.1", tls_context(KEY, "driver"))
        port = server.port
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        context = tls_context(KEY, "rank")
        assert [await echoed(port, context) for _ in range(20)] == [b"hello"] * 20
        ended = [asyncio.create_task(reader.read()) for reader, _ in silent]
        done, open_ = await asyncio.wait(ended, timeout=2.0)
        assert len(done) >= 32 and len(open_) <= 8
        assert all(task.exception() is None or isinstance(task.exception(), ConnectionError) for task in done)
        for _, writer in silent:
            writer.close()
        await asyncio.gather(*ended, return_exceptions=True)
        server.close()

    before = Echo.made
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert Echo.made == before + 20


@LOOPS
def test_another_key_no_certificate_and_plain_text_reach_no_protocol(new_loop: NewLoop) -> None:
    async def main() -> None:
        server = tls.TlsListener(Echo, "127.0.0.1", tls_context(KEY, "driver"))
        port = server.port
        without_certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        without_certificate.check_hostname, without_certificate.verify_mode = False, ssl.CERT_NONE
        for context in (tls_context(make_group_key(), "rank"), without_certificate):
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await echoed(port, context)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"hello" not in await reader.read()
        writer.close()
        server.close()

    before = Echo.made
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert Echo.made == before
