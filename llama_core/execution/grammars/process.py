"""A process that follows the grammars which take too long beside the forward pass, so that no other row waits for them.

llguidance holds Python's global interpreter lock while a matcher takes a token: on any thread, a slow one would stop the rank.
The process starts with the first such grammar, has a lower priority than the rank, and ends when no row has come for a while.
Rank 0 sends a row with all of its answer's tokens, so a process that has ended is replaced without a loss.
"""

import json
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from llama_core.execution.grammars.follower import (
    AnswerFollower,
    BeginAgain,
    CompiledGrammars,
    GrammarRefused,
    GrammarUnavailable,
    RowMasks,
)
from llama_core.json_process import JsonProcess, asked_over, send
from llama_core.log_lines import where
from llama_core.text.vocabulary_file import VocabularyFile

log = logging.getLogger(__name__)

LONGEST_S: Final = 30.0  # of one row, behind what it reads of a resumed answer; the process is ended then
_LONGEST_ENDED_S: Final = 1.0  # of a row whose answer has ended meanwhile
_LONGEST_START_S: Final = 300.0  # 128,000 tokens take seconds of processor time, of which the ranks may leave little
_SIGN_OF_LIFE_S: Final = 1.0  # between two, while many tokens are read
_IDLE_S: Final = 60.0  # without a row: the process ends


@dataclass(frozen=True, slots=True)
class SlowRow:
    """A row of the answer `key`: the masks after `tokens`, all tokens of the answer, and after each of `drafts`. scope: as
    `GrammarSlot` has it. first, limit: as `AnswerFollower` has them."""

    key: int
    scope: str
    grammar: str
    first: int
    limit: int | None
    tokens: list[int]
    drafts: list[int]


class GrammarProcess:
    """Rank 0's side. Rows are followed one after the other."""

    def __init__(self, vocabulary: VocabularyFile) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slow-grammars")
        self._process = JsonProcess(__name__)
        self._is_closed = False
        self._ended: list[int] = []  # keys of answers that the process is to forget

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        return self._process.pid

    def submit(self, row: SlowRow) -> "Future[RowMasks]":
        """The future raises GrammarRefused where the grammar allows no token or takes too long, GrammarUnavailable where no
        process starts, or two have ended."""
        return self._thread.submit(self._masks, row)

    def forget(self, key: int) -> None:
        """The answer has ended: with the next row, the process frees its matcher, which may take 40 MB."""
        self._ended.append(key)

    def close(self) -> None:
        """End the process without a wait for the rows submitted."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.kill()

    def _masks(self, row: SlowRow) -> RowMasks:
        for _ in range(2):
            if self._is_closed:
                break
            try:
                if not self._process.is_running:
                    self._start()
                if self._is_closed:  # while it started
                    break
                ended = [self._ended.pop() for _ in range(len(self._ended))]  # another thread appends
                self._process.send(asdict(row) | {"ended": ended})
                while self._has_answer(row.key):
                    if (found := _received_masks(self._process, 1 + len(row.drafts))) is not None:
                        return found
                # The process would go on with the row. Others' rows are followed again from their tokens.
                self._process.end()
                raise GrammarRefused(f"the grammar cannot be followed: a token takes over {LONGEST_S:g} s")
            except (OSError, EOFError):
                self._process.end()  # it was idle, was killed or was stopped
        self._process.end()
        raise GrammarUnavailable("the grammar cannot be followed: its process has ended twice, or cannot be started")

    def _has_answer(self, key: int) -> bool:
        """Wait for an answer, for up to a second where the row's own answer has ended."""
        end_s = time.monotonic() + LONGEST_S
        while not self._process.has_answer(min(_LONGEST_ENDED_S, max(0.0, end_s - time.monotonic()))):
            if key in self._ended or time.monotonic() >= end_s:
                return False
        return True

    def _start(self) -> None:
        self._process.start()
        self._process.send(asdict(self._vocabulary))
        if not self._process.has_answer(_LONGEST_START_S):
            self._process.end()
            raise GrammarUnavailable("the grammar cannot be followed: its process does not start")
        self._process.answer()


def _received_masks(process: JsonProcess, num_samples: int) -> RowMasks | None:
    """What `_Followers.answer` sent, None for a sign of life. Raises GrammarRefused."""
    found = process.answer()
    if not found:
        return None
    if "refusal" in found:
        raise GrammarRefused(found["refusal"])
    bits = np.frombuffer(process.answered_bytes(), np.uint32).reshape(num_samples, -1)
    return RowMasks(bits, found["forced"], found["shortened"], dict(found["reasons"]))


def main(fd: int) -> None:
    """The process: answer rows until the rank ends or sends none."""
    with asked_over(fd) as connection:
        vocabulary = VocabularyFile(**json.loads(connection.recv_bytes()))
        grammars = CompiledGrammars(vocabulary, vocabulary.vocab_size)
        try:
            grammars.prepare()
        except Exception as error:
            log.error("the vocabulary for grammars cannot be loaded\n%s", where(error))
        send(connection, {})
        followers = _Followers(grammars)
        while connection.poll(_IDLE_S):
            message = json.loads(connection.recv_bytes())
            followers.forget(message.pop("ended"))
            followers.answer(SlowRow(**message), connection)


class _Followers:
    """Of the answers that have not ended, by `SlowRow.key`."""

    def __init__(self, grammars: CompiledGrammars) -> None:
        self._grammars = grammars
        self._followers: dict[int, AnswerFollower] = {}

    def forget(self, keys: list[int]) -> None:
        for key in keys:
            self._followers.pop(key, None)

    def answer(self, row: SlowRow, connection: Connection) -> None:
        """Send the row's masks, or why it has no token."""
        try:
            found = self._masks(row, connection)
        except GrammarRefused as refused:
            self._grammars.drop(row.scope, row.grammar)
            send(connection, {"refusal": str(refused)})
        except Exception as error:
            log.error("a grammar could not be followed\n%s", where(error))
            send(connection, {"refusal": "the grammar could not be followed"})
        else:
            reasons = list(found.reasons.items())
            send(connection, {"forced": found.forced, "shortened": found.shortened, "reasons": reasons})
            connection.send_bytes(found.bits.tobytes())

    def _masks(self, row: SlowRow, connection: Connection) -> RowMasks:
        follower = self._followers.pop(row.key, None) or AnswerFollower(row.grammar, row.first, row.limit)
        bits = np.zeros((1 + len(row.drafts), self._grammars.num_words), np.uint32)
        position, told_s = row.first + len(row.tokens), time.monotonic()
        while True:
            if not follower.has_begun:
                follower.begin(self._grammars.compiled(row.scope, row.grammar), self._grammars)
            try:
                if not follower.reads_more(row.tokens, position):
                    found = follower.masks(row.tokens, position, row.drafts, bits)
                    self._followers[row.key] = follower
                    return found
            except BeginAgain as again:
                if again.is_beyond_limits:
                    self._grammars.drop(row.scope, row.grammar)
            if time.monotonic() - told_s > _SIGN_OF_LIFE_S:
                send(connection, {})
                told_s = time.monotonic()
