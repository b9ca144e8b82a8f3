"""Loads damaged files in worker processes, which may crash. This process must not, and no worker may hang."""

import atexit
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random

from tests.fuzz import hf_damage, tokenizer_damage
from tests.fuzz.damage import damages, put_demo
from tests.fuzz.outcome import Outcome
from tests.support.programs import REPOSITORY, environment

WORKER = [sys.executable, "-m", "tests.fuzz.file_worker"]
TIMEOUT_S = 60.0  # for one file, also beside other tests
_START_TIMEOUT_S = 120.0
_SHARES = {"checkpoint": 2, "params": 3, "tokenizer": 5}  # for ten cases


class Worker:
    """A process that loads files, one after the other."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            WORKER,
            cwd=directory,
            env=environment(PYTHONDONTWRITEBYTECODE="1"),  # a file that it writes is a finding
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._buffer = b""
        assert self._answer(_START_TIMEOUT_S) == ("ready", None)

    def load(self, kind: str, directory: Path, is_rewritten: bool) -> tuple[str, str | None]:
        """The outcome and the finding. After "died" and "hung" this worker cannot be used again."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, str(directory), is_rewritten]).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(TIMEOUT_S)

    def _answer(self, timeout_s: float) -> tuple[str, str | None]:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                self.end()
                return "hung", f"no end after {timeout_s:g} s"
            piece = self._process.stdout.read1(2**16)  # type: ignore[attr-defined]
            if not piece:
                return "died", f"the process died with status {self._process.wait()}"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        ended, fault = json.loads(line)
        return ended, fault

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


_FREE: list[Worker] = []  # of earlier runs: a worker imports torch, which takes longer than a hundred files


@atexit.register
def _end_free_workers() -> None:
    for worker in _FREE:
        worker.end()


def run(cases: int, seed: int, shares: Mapping[str, int] = _SHARES, part: str = "files") -> Outcome:
    """shares: how many cases of each kind make a round."""
    outcome = Outcome(part)
    made = damages() | hf_damage.damages() | tokenizer_damage.damages()
    kinds = [kind for kind, share in shares.items() for _ in range(share)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        put_demo(directory)
        hf_damage.put_folder(directory)
        tokenizer_damage.put_folders(directory)
        worker = _FREE.pop() if _FREE else Worker(REPOSITORY)
        try:
            for number in range(cases):
                case_seed = seed * 1_000_003 + number
                kind = kinds[number % len(kinds)]
                file, content, is_rewritten = made[kind](Random(case_seed))
                undamaged = (directory / file).read_bytes() if (directory / file).exists() else None
                (directory / file).write_bytes(content)
                folder = (directory / file).parent if kind in tokenizer_damage.KINDS else directory
                ended, fault = worker.load(kind, folder, is_rewritten)
                outcome.case(f"{kind}: {ended}")
                if fault is not None:
                    outcome.found(f"{kind}, seed {case_seed}: {fault}")
                if ended in ("died", "hung"):
                    worker = Worker(REPOSITORY)
                if undamaged is not None:
                    (directory / file).write_bytes(undamaged)
                else:
                    (directory / file).unlink()
        except BaseException:
            worker.end()
            raise
        _FREE.append(worker)
        for trap in (directory, REPOSITORY, Path.cwd()):
            if (trap / "sprung").exists():
                outcome.found(f"a pickle has left {trap / 'sprung'}")
    return outcome
