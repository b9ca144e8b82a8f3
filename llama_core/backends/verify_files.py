"""Verifies the files of a checkpoint. Decides which rank reads which files, and which files no rank reads again.

Ranks that see the very same files divide them; a node with its own copy reads that copy. `files.digest.identity`
recognizes files that were verified before, so ranks that replace others do not read unchanged files again. Ranks whose
files differ in contents refuse to load.
"""

import json
import logging
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from llama_core.backends.parallel import Parallel, gather_bytes, ranks_with, smallest
from llama_core.config import EngineConfig
from llama_core.errors import CheckpointChanged, CheckpointError
from llama_core.files.digest import CheckpointDigest, identity, sha256_of_each
from llama_core.files.source import CheckpointSource, WeightReader

log = logging.getLogger(__name__)


class FileChecks:
    """One rank's checks of the checkpoint's files, in this order: `verify_manifest` before any file is parsed,
    `verify_contents` before any weight is loaded, `verify_unchanged` after the last weight.

    Every rank of the group makes one and calls each method. `files_id`, and `digest` after the last method, are an entry for
    `EngineConfig.verified`; `digest` is None if it was not needed.
    """

    def __init__(self, config: EngineConfig, source: CheckpointSource, parallel: Parallel) -> None:
        self._config = config
        self._source = source
        self._parallel = parallel
        self._files = list(source.files)
        self.files_id = identity(self._files)
        self._peers = ranks_with(parallel, self.files_id)
        self._index, self._count = self._peers.index(parallel.rank), len(self._peers)
        self._own_files = self._files[self._index :: self._count]
        self._is_verified = self.files_id in config.verified
        self._has_copies = self._count < parallel.world_size
        self._needs_digest = config.wants_digest or self._has_copies
        self.digest = config.verified.get(self.files_id)
        self._hashing: Future[list[str]] | None = None

    def verify_manifest(self) -> None:
        """Return once the files of every rank have the SHA-256 that the manifest states. Raises CheckpointError."""
        manifest = self._config.manifest
        if manifest is None:
            return
        if not self._is_verified:
            begin = time.perf_counter()
            manifest.check_complete(self._source)
            manifest.verify(self._own_files, torch.get_num_threads())
            log.info(
                "rank %d of %d: the SHA-256 of %d of %d files matches; %.2f s",
                self._parallel.rank,
                self._parallel.world_size,
                len(self._own_files),
                len(self._files),
                time.perf_counter() - begin,
            )
            self.digest = CheckpointDigest(tuple((file.name, manifest.expected(file)) for file in self._files))
        smallest(self._parallel, 1)  # no rank parses a file that another rank has not verified yet

    def verify_contents(self, weights: WeightReader) -> None:
        """Compare the files with the checksums inside them, unless the configuration turns that off, and compare the
        digests of ranks that see different files. Raises CheckpointError, or CheckpointChanged as `verify_unchanged` does.
        """
        if self._needs_digest and self.digest is None:
            self._start_hashing()  # beside the checksums and the load: the files are read from disk once
        if self._config.verify_checksums and not self._is_verified:
            weights.verify_checksums(self._index, self._count)
        if self._has_copies:
            self._compare_digests()

    def verify_unchanged(self) -> None:
        """Raises CheckpointError if the files were changed while they were loaded, CheckpointChanged if they
        are not those that `EngineConfig.expected` describes."""
        if self._needs_digest and not self._has_copies:
            self._compare_digests()
        # Some parts are read by path, others from the files that were mapped at first.
        if identity(self._source.files) != self.files_id:
            raise CheckpointError(f"{self._config.ckpt_dir}: its files were changed while they were loaded")

    def _start_hashing(self) -> None:
        thread = ThreadPoolExecutor(1, "hash")
        self._hashing = thread.submit(lambda: list(sha256_of_each(self._own_files, torch.get_num_threads())))
        thread.shutdown(wait=False)

    def _compare_digests(self) -> None:
        """Raises CheckpointChanged for the first rank without the expected contents, CheckpointError for the first rank
        whose contents differ from rank 0's. Every rank raises the same."""
        begin = time.perf_counter()
        own = self._hashing.result() if self._hashing is not None else []
        parts = gather_bytes(self._parallel, "".join(own).encode())
        if self.digest is None:
            self.digest = self._joined([parts[rank].decode() for rank in self._peers])
        message = json.dumps([socket.gethostname(), self.digest.files])
        # What each rank would load, and the name of the host that it runs on.
        contents = [_decode(raw) for raw in gather_bytes(self._parallel, message.encode())]
        first_host, first_digest = contents[0]
        if self._hashing is not None:
            log.info(
                "rank %d of %d: the digest of the checkpoint is %s; the load waited %.2f s for it",
                self._parallel.rank,
                self._parallel.world_size,
                self.digest.value,
                time.perf_counter() - begin,
            )
        paths, expected = {file.name: file for file in self._files}, self._config.expected
        for rank, (host, digest) in enumerate(contents):
            if expected is not None and digest != expected:
                name, found, wanted = digest.first_difference(expected)
                raise CheckpointChanged(
                    f"{paths.get(name, name)}: rank {rank} on {host} found SHA-256 {found}, the first ranks loaded {wanted}: "
                    "the checkpoint was replaced while it was served"
                )
            if digest != first_digest:
                name, found, first = digest.first_difference(first_digest)
                raise CheckpointError(
                    f"{paths.get(name, name)}: rank {rank} on {host} found SHA-256 {found}, rank 0 on {first_host} found "
                    f"{first}: the nodes hold different checkpoints",
                    param="ckpt_dir",
                )

    def _joined(self, parts: Sequence[str]) -> CheckpointDigest:
        """The digest of all files, from the hashes of the ranks that share them. parts[i]: hex of files i, i + count, ..."""
        digests: list[str] = [""] * len(self._files)
        for index, part in enumerate(parts):
            digests[index :: self._count] = [part[at : at + 64] for at in range(0, len(part), 64)]
        return CheckpointDigest(tuple((file.name, sha256) for file, sha256 in zip(self._files, digests, strict=True)))


def _decode(raw: bytes) -> tuple[str, CheckpointDigest]:
    host, files = json.loads(raw)
    return host, CheckpointDigest(tuple((name, sha256) for name, sha256 in files))
