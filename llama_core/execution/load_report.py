"""The result of loading a rank's part of a model, for the log, the driver and the metrics. Loads no tensors."""

from dataclasses import dataclass

from llama_core.checkpoint.digest import CheckpointDigest


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The seconds of loading, and this rank's bytes of weights, their device and their dtype.

    files_id and digest: see `FileChecks`. max_seq_len: as configured, or as lowered to what memory holds.
    The defaults are those of a rank without a model.
    """

    seconds: float = 0.0
    weight_bytes: int = 0
    device: str = "none"
    dtype: str = "none"
    files_id: int = 0
    digest: CheckpointDigest | None = None
    max_seq_len: int | None = None
