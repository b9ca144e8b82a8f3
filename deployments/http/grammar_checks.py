"""Checks the grammars of requests beside the event loop: ordinary ones in a thread, others in a process of a lower priority.

llguidance leaves Python's global interpreter lock to other threads while it compiles. But a thread has the priority of the
ranks: on a machine whose cores all compute, each check that takes long would delay the tokens of every stream.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from deployments.http.limiter import TurnLimiter
from llama_core.errors import NotReady
from llama_core.text.check_process import CheckProcess
from llama_core.text.grammar import BRIEFLY, Checks, TakesLong
from llama_core.text.grammar_cost import is_unbounded

_MAX_CHARS: Final = 2**23  # of the grammars that are checked in the process, or wait for it
_LEAST_CHARS: Final = 2**17  # that a grammar counts for: the shortest may take 5 s, so at most 64 wait

_CLOSED: Final = "the server is shutting down and takes no new requests"


class GrammarChecks:
    """Of one replica. The process starts with the first check that takes long; such checks wait for each other alone.

    Owners take turns, and each one's grammars that may take seconds do so with those that take up to some tenths of a second: a
    client without a key does not wait for all of another's.
    """

    def __init__(self) -> None:
        self._process = CheckProcess()
        self._limiter = TurnLimiter[str](_MAX_CHARS, "slow grammars are being checked")
        self._is_closed = False

    def close(self) -> None:
        """End the process, because the server takes no more requests: checks in it, and those that wait, raise NotReady."""
        self._is_closed = True
        self._limiter.close(_CLOSED)
        self._process.close()

    async def run(
        self,
        check: Callable[[Checks], str],
        grammar: str,
        param: str,
        in_thread: Callable[[Callable[[], str]], Awaitable[str]],
        owner: str = "",
    ) -> str:
        """What `check` finds of `grammar`. Raises what it raises, QueueFull where too many wait already, and NotReady, which
        names `param`, where the check does not end in time or its process is killed."""
        try:
            return await in_thread(partial(check, BRIEFLY))
        except TakesLong:
            pass
        try:
            key = owner, is_unbounded(grammar)
            return await self._limiter.run(partial(check, self._process), max(len(grammar), _LEAST_CHARS), key)
        except TakesLong:
            if self._is_closed:
                raise NotReady(_CLOSED) from None
            raise NotReady(f"{param}: the check of the grammar has not ended: try again", param=param) from None
