"""Imports what a rank on a GPU needs beside the runner. A standby process does so before it is needed.

No import here makes a CUDA context, which would take memory beside the rank that serves.
"""

import importlib
import logging
import sys
from typing import Final

log = logging.getLogger(__name__)

_MODULES: Final = (
    "llama_core.execution.fused.kernels",
    "llama_core.execution.weight_formats.kernels",
    "llama_core.execution.weight_formats.invariant_kernels",
)


def import_kernels() -> None:
    """Import Triton and all kernels, and compute what their first launches need: the hash of Triton itself, half a gigabyte of
    code, and those of the kernels' sources. Without Triton, loading says what is wrong."""
    try:
        for name in _MODULES:
            importlib.import_module(name)
        _compute_keys()
    except Exception as error:  # any error of an installation
        log.info("kernels are not imported in advance: %s", error)


def _compute_keys() -> None:
    """Compute the hashes, which Triton keeps for the process. Needs no device."""
    from triton.runtime.cache import triton_key
    from triton.runtime.jit import JITFunction

    triton_key()
    # Kernels of all loaded modules, because those above import others.
    kernels = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.startswith("llama_core.")
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    for kernel in kernels.values():
        _ = kernel.cache_key
