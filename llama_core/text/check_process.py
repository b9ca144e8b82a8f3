"""A process that checks the grammars whose check takes long, so that ranks and streams keep their processor time.

A check in a thread has the priority of the event loop and of the ranks beside it, and nothing ends one that goes on. The
process starts with the first such grammar, in 0.1 s, takes 20 MB, and ends when none has come for a while.
"""

import json
import logging
import os
import resource
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any, Final

from llama_core.errors import InvalidParameter
from llama_core.json_process import JsonProcess, asked_over, send
from llama_core.log_lines import where
from llama_core.text.grammar import IN_FULL, TOO_LARGE, TakesLong, schema_of

log = logging.getLogger(__name__)

_LONGEST_S: Final = 120.0  # of one check, for which a busy machine leaves little processor time
# Rank 0 takes up to three times as much, once for the answers of a grammar: it compiles the grammar twice, and looks ahead.
_LONGEST_CPU_S: Final = 2  # the largest grammars take one second
_MOST_BYTES: Final = 2**25  # of address space, beside that of a process without a grammar
_IDLE_S: Final = 60.0  # without a check: the process ends
# Exit statuses of a process that exceeds a limit; llguidance aborts where there is no memory.
_ENDED_BY_LIMIT: Final = {
    -signal.SIGXCPU: f"takes over {_LONGEST_CPU_S} s of processor time",
    -signal.SIGABRT: f"takes over {_MOST_BYTES // 2**20} MiB of memory",
}
_NAMES: Final = ("checked_grammar", "lark_grammar", "compiled")


class CheckProcess:
    """`Checks` of one replica, which are made one after the other. Where no process can be started, a check runs here.

    Raises InvalidParameter for a grammar that exceeds the process's limits of processor time or memory too, and TakesLong where
    a check does not end within 120 s, the process is killed twice, or `close` was called.
    """

    def __init__(self) -> None:
        self._process = JsonProcess(__name__)
        self._lock = Lock()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        return self._process.pid

    def checked_grammar(self, grammar: str, param: str, schema_param: str = "", *, is_whole: bool = True) -> str:
        given = {"grammar": grammar, "param": param, "schema_param": schema_param, "is_whole": is_whole}
        return self._checked("checked_grammar", given)

    def lark_grammar(self, source: str) -> str:
        return self._checked("lark_grammar", {"source": source})

    def compiled(self, grammar: str, param: str) -> str:
        return self._checked("compiled", {"grammar": grammar, "param": param})

    def close(self) -> None:
        """End the process, also during a check. Later checks are refused."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._process.end()
            finally:
                self._lock.release()
        else:
            self._process.kill()

    def _checked(self, name: str, given: dict[str, Any]) -> str:
        with self._lock:
            for _ in range(2):
                if self._is_closed:
                    break
                is_new = not self._process.is_running
                try:
                    if is_new:
                        self._process.start()
                except OSError as error:
                    self._process.end()
                    log.warning("no process for slow grammars can be started: a thread checks them (%s)", error)
                    return str(getattr(IN_FULL, name)(**given))
                if self._is_closed:  # while it started
                    break
                try:
                    self._process.send({"name": name, "given": given})
                    if not self._process.has_answer(_LONGEST_S):
                        self._process.end()
                        raise TakesLong
                    answer = self._process.answer()
                except (OSError, EOFError):  # it was idle, was killed or was stopped
                    # Memory that earlier checks have left may count in one that is not new.
                    reason = _ENDED_BY_LIMIT.get(self._process.end() or 0)
                    if reason is not None and is_new:
                        log.info("a grammar is refused: its check %s", reason)
                        raise _too_large(**given) from None
                    continue
                if "grammar" in answer:
                    return str(answer["grammar"])
                if "message" in answer:
                    raise InvalidParameter(answer["message"], param=answer["param"])
                raise RuntimeError("a grammar could not be checked")
            self._process.end()
            raise TakesLong


def _too_large(grammar: str = "", param: str = "", schema_param: str = "", **_: object) -> InvalidParameter:
    place = param if schema_of(grammar) is None else schema_param or param
    return InvalidParameter(f"{place}: {TOO_LARGE}" if place else TOO_LARGE, param=place or None)


def main(fd: int) -> None:
    """The process: answer checks until the replica ends or sends none."""
    with asked_over(fd) as connection:
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, _num_bytes() + _MOST_BYTES)
        while connection.poll(_IDLE_S):
            asked = json.loads(connection.recv_bytes())
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + _LONGEST_CPU_S)
            _answer(asked, connection)


def _answer(asked: dict[str, Any], connection: Connection) -> None:
    assert asked["name"] in _NAMES
    try:
        send(connection, {"grammar": getattr(IN_FULL, asked["name"])(**asked["given"])})
    except InvalidParameter as refusal:
        send(connection, {"message": refusal.message, "param": refusal.param})
    except MemoryError:
        os.abort()
    except OSError:
        raise
    except Exception as error:
        log.error("a grammar could not be checked\n%s", where(error))
        send(connection, {})


def _limit(kind: int, soft: int) -> None:
    with suppress(OSError, ValueError):  # a lower hard limit
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


def _num_bytes() -> int:
    """Of this process's address space; where that is not known, more than it takes."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**34
