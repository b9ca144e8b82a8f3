"""Python programs as forks of a process that has imported their libraries: importing torch takes longer than most of them.
Some run with Triton's interpreter.

    python -m tests.support.forking MODULE ...    imports the modules, then runs one program for each line of stdin

A line is the JSON of `Program`. Two lines answer it: the process's id, and its exit status.
"""

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Event, Lock, Timer
from typing import Any

from tests.support.programs import REPOSITORY, environment

STREAMS = ("stdin", "stdout", "stderr")


@dataclass(frozen=True, slots=True)
class Program:
    """source: Python. files: paths of its standard streams."""

    source: str
    argv: list[str]
    env: dict[str, str]
    files: list[str]


class ForkServer:
    """Imports the modules with the environment `env`. They must start no thread, which a fork would lack."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            cwd=REPOSITORY,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = Lock()

    def run(
        self, source: str, argv: Sequence[str], env: Mapping[str, str], *, stdin: str = "", timeout_s: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program as `subprocess.run` would. Raises TimeoutExpired."""
        with self._lock, tempfile.TemporaryDirectory() as directory:
            paths = [Path(directory) / name for name in STREAMS]
            for path, text in zip(paths, (stdin, "", ""), strict=True):
                path.write_text(text)
            program = Program(source, list(argv), dict(env), [str(path) for path in paths])
            pid = self._asked(json.dumps(asdict(program)))
            expired = Event()

            def end() -> None:
                expired.set()
                os.kill(pid, signal.SIGKILL)

            timer = Timer(timeout_s, end)
            timer.start()
            status = self._asked("")
            timer.cancel()
            if expired.is_set():
                raise subprocess.TimeoutExpired(list(argv), timeout_s, paths[1].read_text(), paths[2].read_text())
            return subprocess.CompletedProcess(list(argv), status, paths[1].read_text(), paths[2].read_text())

    def _asked(self, line: str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        if line:
            print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        return int(answer)


@cache
def fork_server(modules: tuple[str, ...], changes: tuple[tuple[str, str], ...] = ()) -> ForkServer:
    """One for the whole session, which ends when this process closes its pipe. changes: to `environment()`."""
    return ForkServer(modules, environment(**dict(changes)))


def run_with_torch(
    source: str, *args: str, timeout_s: float = 120, changes: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a program of the model without importing torch once more. args: its `sys.argv[1:]`. changes: to `environment()`,
    without which torch was imported."""
    server = fork_server(("torch", "llama_core.backends.runner"))
    return server.run(source, ["-c", *args], environment(**changes or {}), timeout_s=timeout_s)


_INTERPRET = "TRITON_INTERPRET"
_MODULES = ("torch", "triton", "llama_core.backends.runner")  # what most programs import
_FIRST = f"from {__name__} import prepare_interpreter\nprepare_interpreter()\n"


def interpreted_environment(**others: str) -> dict[str, str]:
    """This process's environment for a child whose kernels are interpreted."""
    return os.environ | {_INTERPRET: "1"} | others


def interpret(source: str, *args: str, timeout_s: float = 300) -> str:
    """What a Python program prints, run in a process of its own whose kernels are interpreted. args: its `sys.argv[1:]`."""
    server = fork_server(_MODULES, ((_INTERPRET, "1"),))
    done = server.run(_FIRST + source, ["-c", *args], interpreted_environment(), timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout


def prepare_interpreter() -> None:
    """Make the interpreter of this process faster, and its products independent of the machine's BLAS. Without TRITON_INTERPRET
    nothing is changed."""
    if os.environ.get(_INTERPRET) == "1":
        _patch_once_a_launch()
        _sum_in_order()


def _patch_once_a_launch() -> None:
    """A launch patches the modules that its kernel names and restores them when it ends. A call of a device function within the
    launch patches the same modules again, which takes longer than the function itself. Here each set is patched once."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[tuple[int, ...]] = set()

    @cache
    def modules_of(function: Any) -> tuple[int, ...]:
        named = filter(inspect.ismodule, function.__globals__.values())
        return tuple(id(module) for module in named if module in (tl, tl.core))

    def patch_lang(function: Any) -> Any:
        modules = modules_of(function)
        if modules in patched:
            return interpreter._LangPatchScope()
        patched.add(modules)
        return patch(function)

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call


def _sum_in_order() -> None:
    """A GPU adds every element of `tl.dot` in one order. The interpreter calls NumPy, whose BLAS on some CPUs adds the last
    rows of a matrix in another order than the first ones. Here all elements are summed in the order of the inner dimension."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        left, right = (each.data.astype(d.data.dtype) for each in (a, b))
        terms = np.swapaxes(left, -1, -2)[..., :, :, None] * right[..., :, None, :]
        return TensorHandle(np.add.reduce(terms, axis=-3) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def _become(program: Program) -> int:
    """Run the program in this process. Returns its exit status."""
    for descriptor, path in enumerate(program.files):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND if descriptor else os.O_RDONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(each, mode) for each, mode in ((0, "r"), (1, "w"), (2, "w")))
    os.environ.clear()
    os.environ.update(program.env)
    sys.argv = program.argv
    try:
        exec(compile(program.source, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            status = _become(Program(**json.loads(line)))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
