"""Whether a checkpoint's files are what they should be: who of the ranks reads what for that, and what need not be read again.

Ranks that see the very same files share the reading; a node with a copy of its own checks that copy. What was checked once is
known by where and what it is (`shards.identity`), so that ranks which take others' places start without it.
"""

import logging
import time

import torch

from llama_core.checkpoint.files import files_of, identity
from llama_core.checkpoint.meta import Checkpoint
from llama_core.config import EngineConfig
from llama_core.errors import CheckpointError
from llama_core.execution.parallel import Parallel, ranks_with, smallest

log = logging.getLogger(__name__)


class FileChecks:
    """For one rank: `verify_manifest` before any file is looked into, `verify_checksums`, and `verify_unchanged` in the end.

    Every rank of the group makes one and calls each of them. `files_id` is what to put into `EngineConfig.checked` later.
    """

    def __init__(self, config: EngineConfig, parallel: Parallel) -> None:
        self._config = config
        self._parallel = parallel
        self._files = files_of(config.ckpt_dir)
        self.files_id = identity(self._files)
        peers = ranks_with(parallel, self.files_id)
        self._index, self._count = peers.index(parallel.rank), len(peers)
        self._is_checked = self.files_id in config.checked

    def verify_manifest(self) -> None:
        """Return once the files of every rank have the SHA-256 that the manifest states. Raises CheckpointError."""
        manifest = self._config.manifest
        if manifest is None:
            return
        if not self._is_checked:
            begin = time.perf_counter()
            manifest.check_complete(self._config.ckpt_dir)
            own = self._files[self._index :: self._count]
            manifest.verify(own, torch.get_num_threads())
            log.info(
                "rank %d of %d: the SHA-256 of %d of %d files is right; %.2f s",
                self._parallel.rank,
                self._parallel.world_size,
                len(own),
                len(self._files),
                time.perf_counter() - begin,
            )
        smallest(self._parallel, 1)  # nobody looks into a file that another rank has not checked yet

    def verify_checksums(self, checkpoint: Checkpoint) -> None:
        """Compare the shards with the CRC-32 inside them, unless the configuration says not to. Raises CheckpointError."""
        if self._config.verify_checksums and not self._is_checked:
            checkpoint.verify_checksums(self._index, self._count)

    def verify_unchanged(self) -> None:
        """With a manifest what was loaded must be what was checked. Raises CheckpointError."""
        if self._config.manifest is not None and identity(files_of(self._config.ckpt_dir)) != self.files_id:
            raise CheckpointError(f"{self._config.ckpt_dir}: its files were changed while they were loaded")
