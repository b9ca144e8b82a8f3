"""Which operations the layers have, and which device runs them."""

import torch

from llama_core.errors import ConfigError
from llama_core.execution.fused.device import CudaDevice, EagerDevice, FusedDevice
from llama_core.execution.fused.ops import Ops, TorchOps
from llama_core.execution.fused.product_choice import of_few_rows


def choose_ops(kind: str, device: torch.device, *, batch_invariant: bool = False) -> tuple[Ops, FusedDevice]:
    """kind "fused": Triton's kernels and CUDA graphs on a GPU. Else, and on a CPU, the operations in torch, one by one. Raises
    ConfigError where Triton does not work, and where the operations in torch are to be batch-invariant."""
    if device.type != "cuda" or kind == "torch":
        if batch_invariant:
            raise ConfigError(
                "batch_invariant needs a GPU with the fused backend; on a CPU the native backend is always batch-invariant",
                param="batch_invariant",
            )
        if device.type == "cuda":
            # It makes a plan for each new shape, in up to half a second, and each chunk of a prompt has its own.
            torch.backends.cuda.enable_cudnn_sdp(False)
        return TorchOps(), EagerDevice(device)
    try:
        from llama_core.execution.fused.kernels import TritonOps

        ops = TritonOps(batch_invariant=batch_invariant, fuses=of_few_rows)
        ops.gated_silu(torch.zeros((1, 2), device=device))  # builds Triton's launcher, which needs a C compiler
    except Exception as error:  # any error of Triton, the compiler or the file system
        # In torch, attention would gather whole block tables, for which no memory is planned.
        raise ConfigError(
            f"Triton does not work here ({error}): install a C compiler and Python's headers, or give backend: torch",
            param="backend",
        ) from error
    return ops, CudaDevice(device)
