"""Checks the grammars of requests beside the event loop: ordinary ones in a thread, others in a process of a lower priority.

llguidance leaves Python's global interpreter lock to other threads while it compiles. But a thread has the priority of the
ranks: on a machine whose cores all compute, each check that takes long would delay the tokens of every stream.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from deployments.http.limiter import ConcurrencyLimiter
from llama_core.errors import NotReady
from llama_core.text.check_process import CheckProcess
from llama_core.text.grammar import BRIEFLY, Checks, TakesLong

_MAX_CHARS: Final = 2**23  # of the grammars that are checked in the process, or wait for it
_LEAST_CHARS: Final = 2**17  # that a grammar counts for: the shortest may take 5 s, so at most 64 wait


class GrammarChecks:
    """Of one replica. The process starts with the first check that takes long; such checks wait for each other alone."""

    def __init__(self) -> None:
        self._process = CheckProcess()
        self._limiter = ConcurrencyLimiter(at_once=1, max_weight=_MAX_CHARS, work="slow grammars are being checked")

    async def run(
        self,
        check: Callable[[Checks], str],
        num_chars: int,
        param: str,
        in_thread: Callable[[Callable[[], str]], Awaitable[str]],
    ) -> str:
        """What `check` finds. Raises what it raises, QueueFull where too many wait already, and NotReady, which names `param`,
        where the check does not end in time or its process is killed."""
        try:
            return await in_thread(partial(check, BRIEFLY))
        except TakesLong:
            pass
        try:
            return await self._limiter.run(partial(check, self._process), max(num_chars, _LEAST_CHARS))
        except TakesLong:
            raise NotReady(f"{param}: the check of the grammar has not ended: try again", param=param) from None
