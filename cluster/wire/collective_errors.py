"""Tells an error of an operation between ranks, which another rank's death may have caused, from a rank's own error."""

import sys


def is_collective(error: BaseException) -> bool:
    """Whether `error` came out of an operation between ranks. Imports no torch: an error of torch's needs torch loaded."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "nccl", "connection closed by peer")
    )
