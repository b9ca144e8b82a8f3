"""A sharded Llama: checkpoints, model, cache, scheduler, sampling. Works alone; knows nothing of Ray or HTTP.

`Llama` is imported on first use, because it needs torch and the ingress, which imports this package too, does not.
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
