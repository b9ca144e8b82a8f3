"""Serve's HTTP servers behind HAProxy: on a private unix socket, with bounded heads, and without chunk sizes for HTTP/1.0.

A port is free once its process has died: another user who binds it would get HAProxy's requests with keys and prompts. Only
this user can enter the sockets' folder. The wrapper of HAProxy names the same sockets, by the ids of replicas and nodes.
"""

import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import ray
import uvicorn
from ray.serve._private import http_util
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from deployments.local.small_cluster import ADDRESS

MAX_HEAD_BYTES: Final = 2**16  # as HAProxy's; httptools copies all of an endless header for each packet
BACKLOG: Final = 4096  # of HAProxy's connections none must fail while the process stands still, or it is taken for dead


def listen_privately() -> None:
    """Patch Serve in this process, a replica or a proxy, which has not started its server yet."""
    module: Any = http_util
    if os.environ.get("LLAMA_FRONT_SOCKETS") and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        module.uvicorn = SimpleNamespace(Config=uvicorn.Config, Server=PrivateServer)


class PrivateServer(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """sockets: the port that Serve has bound. It stays bound, and HAProxy of other nodes connects to it."""
        name = ray.get_runtime_context().get_actor_name() or ""  # SERVE_REPLICA::llama#LlamaIngress#a1b2c3d4
        path = Path(os.environ["LLAMA_FRONT_SOCKETS"], re.split("[#-]", name)[-1])
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.config.uds, self.config.backlog, self.config.http_protocol_class = str(path), BACKLOG, BoundedHeads
        await super().startup()
        if ray.util.get_node_ip_address() != ADDRESS:  # type: ignore[no-untyped-call]  # a small cluster has no other nodes
            private = self.servers
            await super().startup(sockets)
            self.servers += private


class UntilClosed(RequestResponseCycle):
    async def send(self, message: Any) -> None:
        self.chunked_encoding, self.expected_content_length = False, len(message.get("body", b""))
        await super().send(message)


class BoundedHeads(HttpToolsProtocol):
    _num_head_bytes: int | None = 0  # None after a whole head

    def data_received(self, data: bytes) -> None:
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if (self._num_head_bytes or 0) > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head is too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0  # without what has come with the request before it

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._num_head_bytes = None
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = UntilClosed
