"""What a rank reports when it has loaded its part of a model: for the driver, the log and /props. No tensors."""

from dataclasses import dataclass

from llama_core.files.digest import CheckpointDigest


@dataclass(frozen=True, slots=True)
class RankReport:
    """The defaults are those of a rank without a model. `cluster` adds the process, its node and its cores.

    load_seconds: from reading the checkpoint's first file on. start_seconds: from the call on, with rendezvous and imports.
    share: the part of the model, in words. cores: empty for a rank that is not pinned. max_seq_len: as configured, or as
    lowered to what memory holds. files_id and digest: see `FileChecks`. numerics: of ranks that compute the same bits from the
    same numbers: the version of the code and, where torch computes on a CPU, the machine.
    """

    rank: int = 0
    node: str = ""  # IP address
    pid: int = 0
    device: str = "none"
    dtype: str = "none"  # of activations, and the formats of its weights
    weight_bytes: int = 0
    load_seconds: float = 0.0
    start_seconds: float = 0.0
    share: str = ""
    cores: tuple[int, ...] = ()
    max_num_blocks: int = 0
    max_seq_len: int | None = None
    files_id: int = 0
    digest: CheckpointDigest | None = None
    numerics: str = ""
