"""Tells an error of an operation between ranks, which another rank's death may have caused, from a rank's own error."""

import sys


def is_collective(error: BaseException) -> bool:
    """Whether an operation between ranks raised `error`. Imports no torch: only a loaded torch raises its errors."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "nccl", "connection closed by peer")
    )
