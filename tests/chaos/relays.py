"""Relays between fronts and engines that can fall silent: as in a partition, no connection ends and nobody is told.

The chaos's program runs them, so that they outlive an engine whose node loses power. An engine of this module's application
asks for one by a file, and invites fronts to the relay instead of to itself.
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Final

from ray.serve import Application

from deployments import app
from deployments.args import EngineArgs
from deployments.fleet.front_server import FrontServer
from deployments.fleet.invitation import Invitation
from deployments.replicas.engine import LlamaEngine

DIRECTORY: Final = "LLAMA_CHAOS_RELAYS"
ASKED_WITHIN_S: Final = 60.0
PIECE_BYTES: Final = 2**18


class RelayedEngine(LlamaEngine):
    """Whose connections with fronts of other nodes go through a relay."""

    async def __init__(self, args: EngineArgs) -> None:  # type: ignore[misc]
        opened = FrontServer.open

        async def relayed(server: FrontServer, node: str, host: str) -> Invitation:
            invitation = await opened(server, node, host)
            return replace(invitation, host="127.0.0.1", port=await _asked(host, invitation.port))

        FrontServer.open = relayed  # type: ignore[assignment, method-assign]
        await super().__init__(args)


RelayedEngine.__name__ = LlamaEngine.__name__  # the deployment's


def build_engine(args: EngineArgs) -> Application:
    """As `deployments.app.build_engine` does, with a relay."""
    setattr(app, LlamaEngine.__name__, RelayedEngine)
    return app.build_engine(args)


async def _asked(host: str, port: int) -> int:
    """The port of a relay to this one."""
    asked = Path(os.environ[DIRECTORY], f"{os.getpid()}-{port}")
    asked.with_suffix(".new").write_text(f"{host} {port}")
    asked.with_suffix(".new").rename(asked.with_suffix(".asked"))
    async with asyncio.timeout(ASKED_WITHIN_S):
        while not asked.with_suffix(".port").exists():  # noqa: ASYNC110 (another process writes it)
            await asyncio.sleep(0.05)
    return int(asked.with_suffix(".port").read_text())


class Relay:
    """Passes bytes on. What a silenced direction ("to" the engine, "from" it) carries waits, its FIN too."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._silent: frozenset[str] = frozenset()  # of new connections too
        self._open: dict[int, dict[str, threading.Event]] = {}  # by the front's port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self, directions: Collection[str], front_port: int | None = None) -> None:
        """front_port: of one connection; without it of all. No directions: carry all again."""
        if front_port is None:
            self._silent = frozenset(directions)
        for port, events in list(self._open.items()):
            for direction, event in events.items():
                if front_port in (None, port):
                    (event.clear if direction in directions else event.set)()

    def _accept(self) -> None:
        while True:
            front, (_, port) = self._listener.accept()
            threading.Thread(target=self._carry, args=(front, port), daemon=True).start()

    def _carry(self, front: socket.socket, port: int) -> None:
        events = self._open[port] = {"to": threading.Event(), "from": threading.Event()}
        for direction, event in events.items():
            if direction not in self._silent:
                event.set()
        events["to"].wait()  # a connection begins with a packet to the engine's node
        try:
            engine = socket.create_connection(self._target)
        except OSError:
            front.close()
            return
        back = threading.Thread(target=self._pump, args=(engine, front, events["from"]), daemon=True)
        back.start()
        self._pump(front, engine, events["to"])
        back.join()
        for each in (front, engine):
            each.close()

    def _pump(self, source: socket.socket, sink: socket.socket, is_open: threading.Event) -> None:
        with contextlib.suppress(OSError):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := source.recv(PIECE_BYTES):
                is_open.wait()
                sink.sendall(data)
        is_open.wait()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


class Relays:
    """Of all engines. `of`: by the process of the engine."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        os.environ[DIRECTORY] = str(directory)
        self.of: dict[int, Relay] = {}
        self._directory = directory
        threading.Thread(target=self._answer_always, daemon=True).start()

    def _answer_always(self) -> None:
        while True:
            for asked in self._directory.glob("*.asked"):
                host, port = asked.read_text().split()
                relay = self.of[int(asked.name.partition("-")[0])] = Relay((host, int(port)))
                asked.unlink()
                asked.with_suffix(".written").write_text(str(relay.port))
                asked.with_suffix(".written").rename(asked.with_suffix(".port"))
            time.sleep(0.05)
