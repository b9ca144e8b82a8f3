"""The keys by which Triton compiles variants of kernels for a GPU, of launches that happen on torch's meta device.

Tensors there have addresses relative to their storage, and so the alignment that they have on a GPU, whose allocations begin at
multiples of 512 bytes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from tests.support.counted_memory import without_kernels

Key = tuple[str, str, str]  # the kernel, what Triton knows of its arguments, and its options


@contextmanager
def recorded_keys(sm: int = 90) -> Iterator[set[Key]]:
    """The keys of all kernels that are launched inside. None is compiled."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend, keys = make_backend(GPUTarget("cuda", sm, 32)), set[Key]()

    @cache
    def binder(kernel: Any) -> Any:
        return create_function_from_signature(kernel.signature, kernel.params, backend)

    def launch(kernel: Any, grid: object) -> Callable[..., None]:
        def note(*args: object, **options: object) -> None:
            _, specialization, others = binder(kernel)(*args, **options)
            keys.add((kernel.fn.__name__, str(specialization), str(sorted(others.items()))))

        return note

    with without_kernels(), patch.object(JITFunction, "__getitem__", launch):
        yield keys
