"""Triton's interpreter in a process of its own, faster and with products whose bits do not depend on the machine's BLAS.

A launch patches the modules that its kernel names and restores them when it ends. A call of a device function within the launch
patches the same modules again, which takes longer than the function itself. Here a launch patches each set of modules once.

A GPU adds every element of `tl.dot` in one order. The interpreter calls NumPy, whose BLAS on some CPUs adds the last rows of a
matrix in another order than the first ones. Here all elements are summed in the order of the inner dimension.
"""

import inspect
import os
from functools import cache
from typing import Any

from tests.support.forking import fork_server

_VARIABLE = "TRITON_INTERPRET"
_MODULES = ("torch", "triton", "llama_core.backends.runner")  # what most programs import
_FIRST = f"from {__name__} import prepare_interpreter\nprepare_interpreter()\n"


def interpreted_environment(**others: str) -> dict[str, str]:
    """This process's environment for a child whose kernels are interpreted."""
    return os.environ | {_VARIABLE: "1"} | others


def interpret(source: str, *args: str, timeout_s: float = 300) -> str:
    """What a Python program prints, run in a process of its own whose kernels are interpreted. args: its `sys.argv[1:]`."""
    server = fork_server(_MODULES, ((_VARIABLE, "1"),))
    done = server.run(_FIRST + source, ["-c", *args], interpreted_environment(), timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout


def prepare_interpreter() -> None:
    """Change the interpreter of this process. Without TRITON_INTERPRET nothing is changed."""
    if os.environ.get(_VARIABLE) == "1":
        _patch_once_a_launch()
        _sum_in_order()


def _patch_once_a_launch() -> None:
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
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        left, right = (each.data.astype(d.data.dtype) for each in (a, b))
        terms = np.swapaxes(left, -1, -2)[..., :, :, None] * right[..., :, None, :]
        return TensorHandle(np.add.reduce(terms, axis=-3) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
