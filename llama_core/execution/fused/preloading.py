"""What a rank on a GPU imports behind the runner, in advance: a standby process does so before it is needed.

No import here makes a CUDA context, which would take memory beside the rank that serves.
"""

import importlib
import logging
from typing import Final

log = logging.getLogger(__name__)

_MODULES: Final = (
    "llama_core.execution.fused.kernels",
    "llama_core.execution.fused.all_reduce_kernels",
    "llama_core.execution.weight_formats.kernels",
    "llama_core.execution.weight_formats.invariant_kernels",
    "torch.distributed._symmetric_memory",
)


def import_kernels() -> None:
    """Import Triton and all kernels. Without Triton, loading says what is wrong."""
    try:
        for name in _MODULES:
            importlib.import_module(name)
    except Exception as error:  # any error of an installation
        log.info("kernels are not imported in advance: %s", error)
