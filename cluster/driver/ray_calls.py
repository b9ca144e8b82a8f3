"""Awaits calls to all ranks at once; of several failures, picks the one that caused the others."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.wire.collective_errors import is_collective
from llama_core.errors import LlamaError, RankFailure

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A rank's failure makes its peers fail too, and their errors may arrive first. This is the wait for the first cause.
_SECOND_SIGN_S: Final = 0.2


async def result_of(ref: Awaitable[T]) -> T:
    """A Ray reference as a coroutine, which asyncio's functions need."""
    return await ref


async def in_passing_thread(function: Callable[..., T], *arguments: object) -> T:
    """Run a blocking function in a thread that ends with it. asyncio.to_thread would keep its thread for ever."""
    executor = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
    finally:
        executor.shutdown(wait=False)


def kill_actors(actors: Iterable[Any]) -> None:
    """Kill every actor. An actor that Ray cannot kill is logged and does not stop the others from being killed. Blocks."""
    for actor in actors:
        try:
            ray.kill(actor, no_restart=True)
        except Exception as error:
            logger.warning("Ray cannot kill an actor: %s", first_line(error))


async def answer_within(ref: Awaitable[T], timeout_s: float) -> T | None:
    """None if no answer arrives in time or the actor is gone."""
    try:
        async with asyncio.timeout(timeout_s):
            return await ref
    except (TimeoutError, RayError):
        return None


async def results_of_all(refs: Sequence[Awaitable[Any]], doing: str) -> list[Any]:
    """The results of one call to each rank, in the order of the ranks.

    On failure raises the likeliest cause: the LlamaError that a rank raised, else a RankFailure that names the rank, what it
    was `doing` and why it failed.
    """
    tasks = [asyncio.ensure_future(result_of(ref)) for ref in refs]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=_SECOND_SIGN_S)
        errors = {rank: error for rank, task in enumerate(tasks) if task.done() and (error := task.exception())}
        if errors:
            rank = min(errors, key=lambda rank: _severity(errors[rank]))
            raise _failure(rank, doing, errors[rank]) from errors[rank]
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


def first_line(error: BaseException) -> str:
    """An error in one line. Ray's messages are long, and their first line says little about the death of an actor."""
    if isinstance(error, RayActorError):
        reasons = [line for line in str(error).splitlines() if "exit type" in line or "dead because" in line]
        text = reasons[0] if reasons else str(error)
        return text.strip().split(" Some common causes")[0][:300]
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _cause(error: BaseException) -> BaseException:
    """The exception that a rank raised, without Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error


def _severity(error: BaseException) -> int:
    """The lowest is the likeliest cause: a user's mistake, a death, an exception, a collective error."""
    cause = _cause(error)
    if isinstance(cause, LlamaError):
        return 0
    if isinstance(error, RayActorError):
        return 1
    return 3 if is_collective(cause) else 2


def _failure(rank: int, doing: str, error: BaseException) -> LlamaError:
    cause = _cause(error)
    if isinstance(cause, LlamaError):
        return cause
    what = "died" if isinstance(error, RayActorError) else f"failed ({type(cause).__name__})"
    return RankFailure(f"rank {rank} {what} while {doing}: {first_line(cause)}", rank=rank)
