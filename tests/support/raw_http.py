"""HTTP over plain sockets, for clients that violate the protocol and for many clients at little cost."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.server import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        """The error of an answer in OpenAI's shape."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and b"Traceback" not in self.body
        return error

    def events(self) -> list[dict[str, Any]]:
        """The chunks of a complete stream, which ends with one [DONE]."""
        events = [line[6:] for line in self.body.split(b"\n\n") if line.startswith(b"data: ")]
        assert events and events[-1] == b"[DONE]" and events.count(b"[DONE]") == 1, self.body[-300:]
        return [json.loads(event) for event in events[:-1]]


def message(path: str, body: bytes | dict[str, Any], *headers: str, length: int | None = None) -> bytes:
    """A POST request. `length` replaces the true Content-Length."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    has_type = any(header.lower().startswith("content-type") for header in headers)
    given = (*(() if has_type else ("Content-Type: application/json",)), *headers)
    size = len(raw) if length is None else length
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {size}", *given]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + raw


def connect(server: Server, *, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(120)  # for whole answers, on a machine that other tests share
    connection.connect(("127.0.0.1", server.port))
    return connection


async def ask(server: Server, request: bytes, patience_s: float = 120.0) -> Answer:
    """The answer to a request, sent over a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**24)
    try:
        async with asyncio.timeout(patience_s):
            writer.write(request)
            return await read_answer(reader)
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
    return Answer(int(lines[0].split()[1]), headers, body)


def num_descriptors(server: Server) -> int:
    """Open files of the processes that handle HTTP."""
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in _http_processes(server))


def resident_bytes(server: Server) -> int:
    """Resident memory of the processes that handle HTTP."""
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in _http_processes(server)]
    return sum(1024 * int(status.split("VmRSS:")[1].split()[0]) for status in statuses)


def _http_processes(server: Server) -> list[int]:
    names = ("/haproxy ", "ProxyActor", "ServeReplica")
    return [pid for pid, command in server.processes().items() if any(name in command for name in names)]
