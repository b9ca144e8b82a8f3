"""Whether an engine that ends is replaced by one that computes the same bits, so that fronts may hold its streams for it."""

import asyncio
import logging
from typing import Any, Final

from ray import serve

from cluster.driver.ray_calls import in_passing_thread
from deployments.args import EngineArgs, resolve
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.files.adapter import CONFIG, WEIGHTS
from llama_core.files.files import identity

log = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 5.0
# The arguments on which the bits of an answer and its length depend.
_SAME: Final = (
    "model_id",
    "ckpt_dir",
    "tokenizer_path",
    "model_parallel_size",
    "max_seq_len",
    "device",
    "dtype",
    "kv_cache_dtype",
    "backend",
    "quantization",
    "batch_invariant",
    "lora_adapters",
    "lora_root",
    "max_lora_rank",
)


class Successor:
    """Made when the engine starts."""

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self._identity = _identity(args)

    async def is_coming(self) -> bool:
        """By the configuration that Serve has deployed, which an update has changed by now. False if that is unknown."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                deployed = await in_passing_thread(_deployed_args)
            if deployed is None:
                return False
            args = EngineArgs(**deployed)
            resolved = {"device": self._args.device, "model_parallel_size": args.num_ranks()}  # as `build_engine` does
            args = args.model_copy(update=resolved)
            is_same = all(getattr(args, name) == getattr(self._args, name) for name in _SAME)
            return is_same and _identity(args) == self._identity
        except Exception as error:
            log.warning("whether another engine follows is unknown: %s", type(error).__name__)
            return False


def _identity(args: EngineArgs) -> int:
    adapters = [resolve(folder) / name for folder in args.lora_adapters.values() for name in (CONFIG, WEIGHTS)]
    return identity([*open_checkpoint(args.checkpoint).files, *adapters])


def _deployed_args() -> dict[str, Any] | None:
    """The arguments of this replica's application as it is configured now; None where it is being deleted. A private interface
    of Serve's: the public one is the dashboard's, which a cluster may lack."""
    client: Any = serve.context._get_global_client()
    application = client.get_serve_details()["applications"].get(serve.get_replica_context().app_name)
    if application is None or application["status"] == "DELETING" or not application.get("deployed_app_config"):
        return None
    arguments: dict[str, Any] = application["deployed_app_config"]["args"]
    return arguments
