"""Whether an engine that ends is replaced by one that continues its streams, so that fronts may hold them for it.

In doubt none is: then streams end on their engine, if `drain_timeout_s` suffices.
"""

import asyncio
import logging
from pathlib import Path
from typing import Final

from cluster.driver.ray_calls import in_passing_thread
from deployments.args import NUMERIC, SAME, EngineArgs, resolve
from deployments.fleet.cluster import Cluster
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.files.adapter import CONFIG, WEIGHTS
from llama_core.files.code import code_version
from llama_core.files.digest import identity
from llama_core.remote.names import remote_name
from llama_core.text.registry import tokenizer_files
from llama_core.text.template.files import template_files

log = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 5.0


class Successor:
    """Made when the engine starts."""

    def __init__(self, args: EngineArgs, cluster: Cluster) -> None:
        self._args, self._cluster = args, cluster
        self._identity = _identity(args)
        self._code = code_version()

    async def is_coming(self) -> bool:
        """By the configuration that Serve has deployed, which an update has changed by now. False if that is unknown."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                deployed = await self._cluster.deployed_args()
                return deployed is not None and await in_passing_thread(self._is_equal, EngineArgs(**deployed))
        except Exception as error:
            log.warning("whether another engine follows is unknown: %s", type(error).__name__)
            return False

    def _is_equal(self, args: EngineArgs) -> bool:
        resolved = {"device": self._args.device, "model_parallel_size": args.num_ranks()}  # as `build_engine` does
        args = args.pinned().model_copy(update=resolved)
        is_same = all(args.marked(mark) == self._args.marked(mark) for mark in (NUMERIC, SAME))
        return is_same and _identity(args) == self._identity and code_version() == self._code


def _identity(args: EngineArgs) -> int:
    """Of the files on this machine: the name of a remote model says its revision."""
    folders = (folder for folder in args.lora_adapters.values() if not remote_name(folder))
    adapters = [resolve(folder) / name for folder in folders for name in (CONFIG, WEIGHTS)]
    checkpoint: list[Path] = [] if remote_name(args.ckpt_dir) else [*open_checkpoint(args.checkpoint).files]
    tokenizer = [] if remote_name(args.tokenizer_path or args.ckpt_dir) else tokenizer_files(args.tokenizer)
    template = [Path(args.chat_template).expanduser()] if args.chat_template else []
    if not template and checkpoint:
        template = template_files(args.checkpoint)
    return identity([*checkpoint, *tokenizer, *template, *adapters])
