"""Loads damaged files in worker processes, which may crash. This process must not, and no worker may hang."""

import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from random import Random

from tests.fuzz import hf_damage, tokenizer_damage
from tests.fuzz.damage import damages, put_demo
from tests.fuzz.file_worker import begin, load
from tests.fuzz.outcome import Outcome
from tests.support.programs import REPOSITORY

TIMEOUT_S = 60.0  # for one file, also beside other tests
_START_TIMEOUT_S = 120.0
_SHARES = {"checkpoint": 2, "params": 3, "tokenizer": 5}  # for ten cases


@cache
def _worker() -> ProcessPoolExecutor:
    """One process, for all files until it dies or hangs: it imports torch, which takes longer than a hundred of them."""
    made = ProcessPoolExecutor(1, get_context("spawn"), begin)
    made.submit(int).result(_START_TIMEOUT_S)
    return made


def _loaded(kind: str, folder: Path, is_rewritten: bool) -> tuple[str, str | None]:
    """The outcome and the finding."""
    worker = _worker()
    try:
        return worker.submit(load, kind, folder, is_rewritten).result(TIMEOUT_S)
    except BrokenProcessPool as error:
        ended = "died", f"the process died: {error}"
    except TimeoutError:
        for process in list(worker._processes.values()):
            process.kill()
        ended = "hung", f"no end after {TIMEOUT_S:g} s"
    _worker.cache_clear()
    return ended


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
        for number in range(cases):
            case_seed = seed * 1_000_003 + number
            kind = kinds[number % len(kinds)]
            file, content, is_rewritten = made[kind](Random(case_seed))
            undamaged = (directory / file).read_bytes() if (directory / file).exists() else None
            (directory / file).write_bytes(content)
            folder = (directory / file).parent if kind in tokenizer_damage.KINDS else directory
            ended, fault = _loaded(kind, folder, is_rewritten)
            outcome.case(f"{kind}: {ended}")
            if fault is not None:
                outcome.found(f"{kind}, seed {case_seed}: {fault}")
            if undamaged is not None:
                (directory / file).write_bytes(undamaged)
            else:
                (directory / file).unlink()
        for trap in (directory, REPOSITORY, Path.cwd()):
            if (trap / "sprung").exists():
                outcome.found(f"a pickle has left {trap / 'sprung'}")
    return outcome
