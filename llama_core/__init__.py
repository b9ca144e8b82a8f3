"""A sharded Llama: checkpoints, model, cache, scheduler, sampling. Works without Ray and HTTP, and knows neither.

`Llama` is imported on first use, because it needs torch. The ingress imports this package too and does without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_core.generation import Llama

__all__ = ["Llama"]


def __getattr__(name: str) -> Any:
    if name == "Llama":
        from llama_core.generation import Llama

        return Llama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
