"""Runs a history: ids, keys, chance and time come from its seed."""

import asyncio
import logging
import random
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Final
from unittest import mock

from cluster.wire import tls
from deployments.engine import service
from deployments.fleet import fleet
from deployments.fleet.placement import Placement
from deployments.links import engine_link, front_server, model_files
from deployments.links.engine_link import EngineLink
from deployments.links.front_server import FrontConnection
from deployments.links.link import Link, RoutedStream
from llama_core.errors import QueueFull
from llama_core.log_lines import where
from llama_core.scheduling.scheduler import Scheduler
from llama_core.text.model_text import ModelText
from llama_core.text.registry import load_tokenizer
from tests.simulation.expected_answers import Wrong
from tests.simulation.history import Event, Setting, drawn
from tests.simulation.operators import OperatedWorld
from tests.simulation.rules import Log
from tests.support.virtual_loop import VirtualLoop, listener, network

DAY_S: Final = 20.0  # of the loop's time: templates write the date into prompts


@contextmanager
def deterministic(seed: int, loop: VirtualLoop) -> Iterator[None]:
    """Ids, keys and the date come from the seed and the loop. What every process would compute anew, and takes milliseconds, is
    computed once: a key for TLS, the tokenizer, the texts of a model."""
    draw = random.Random(seed)
    with ExitStack() as patches:
        for module, name, value in (
            (uuid, "uuid4", lambda: uuid.UUID(int=draw.getrandbits(128), version=4)),
            (secrets, "token_bytes", lambda count=32: draw.randbytes(count)),
            (secrets, "randbits", draw.getrandbits),
            (front_server, "make_group_key", _key),
            (front_server, "tls_context", lambda *_: None),
            (engine_link, "tls_context", lambda *_: None),
            (front_server, "TlsListener", listener),
            (service, "load_tokenizer", _tokenizer),
            (fleet, "unpack", _text),
            (time, "time", lambda: 1_700_000_000.0 + loop.time() * 86_400 / DAY_S),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield


_key = cache(tls.make_group_key)
_tokenizer = cache(load_tokenizer)
_texts: dict[str, Any] = {}
_unpack = model_files.unpack


def _text(files: Any) -> Any:
    """Another object for each process."""
    if files.digest not in _texts:
        _texts[files.digest] = _unpack(files)
    return ModelText(*_texts[files.digest])


@contextmanager
def watched(world: OperatedWorld) -> Iterator[None]:
    """Tell the world of calls inside of the product."""
    close, suspect, make_room = FrontConnection.close, EngineLink.suspect, Scheduler.make_room
    move, order, part = Placement._move, Placement._by_policy, Placement.on_goodbye

    def closed(connection: FrontConnection, reason: str, level: int = logging.WARNING) -> None:
        world.rules.on_close(connection, reason)
        close(connection, reason, level)

    def suspected(link: EngineLink) -> None:
        suspect(link)
        if not link.is_lost:
            world.on_suspicion()

    def made_room(scheduler: Scheduler, lengths: Sequence[int], owner: str, **priority: bool) -> Any:
        try:
            return make_room(scheduler, lengths, owner, **priority)
        except QueueFull as error:
            world.rules.on_refused(scheduler, lengths, owner, error.message)
            raise

    def moved(model: Placement, link: Link, *, silent_since_s: float | None = None, **how: bool) -> None:
        lives = [live for live in link.streams.values() if live.is_accepted]
        move(model, link, silent_since_s=silent_since_s, **how)
        world.rules.on_moved(model, link, [live for live in lives if live.link is not link], silent_since_s)

    def parted(model: Placement, link: Link, *, has_successor: bool) -> None:
        lives = list(link.streams.values())
        part(model, link, has_successor=has_successor)
        is_held = any(live.link is None and live.lost_s is not None and not live.stream.ended for live in lives)
        if is_held and not has_successor:
            world.rules.wrong.append("a stream waits for another engine, and its own one could have ended it")

    def ordered(model: Placement, links: Sequence[Link], lives: Sequence[RoutedStream]) -> Sequence[Link]:
        found = order(model, links, lives)
        world.rules.on_choice(model, links, lives[0], found[0]) if found else None
        return found

    with (
        mock.patch.object(Placement, "_move", moved),
        mock.patch.object(Placement, "on_goodbye", parted),
        mock.patch.object(Placement, "_by_policy", ordered),
        mock.patch.object(FrontConnection, "close", closed),
        mock.patch.object(EngineLink, "suspect", suspected),
        mock.patch.object(Scheduler, "make_room", made_room),
    ):
        yield


async def _end_all() -> None:
    """Of processes that were killed, or of a history that did not end."""
    network().end_faults()
    while left := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=60.0)


def finding(setting: Setting, events: Sequence[Event]) -> tuple[str, int]:
    """What does not hold in this history, "" if all does; and the number of messages that were sent."""
    _warmed_up()
    return _finding(setting, events)


@cache
def _warmed_up() -> None:
    """A process's first history draws other random numbers: modules are imported, and caches filled."""
    _finding(*drawn(1))


def _finding(setting: Setting, events: Sequence[Event]) -> tuple[str, int]:
    draw = random.Random(setting.seed)
    loop = VirtualLoop(lambda: draw.random() < 0.5)
    loop.network.jitter = lambda: 1.0 + draw.random()

    async def lived() -> None:
        world = OperatedWorld(setting)
        try:
            with watched(world):
                await world.run(events)
        finally:
            await world.end()

    found, log = "", Log()
    loggers = [logging.getLogger(name) for name in ("deployments", "llama_core", "cluster")]
    with deterministic(setting.seed, loop):
        for logger in loggers:
            logger.addHandler(log)
        try:
            loop.run_until_complete(lived())
        except Exception as error:
            found = f"{type(error).__name__}: {error}" + ("" if isinstance(error, Wrong) else f"\n{where(error)}")
        finally:
            for logger in loggers:
                logger.removeHandler(log)
            loop.run_until_complete(_end_all())
            loop.close()
    return found or "; ".join([*loop.errors, *log.unexpected]), next(loop.network._count)
