"""What an engine is given: the settings of a rank. Frozen, validated field by field, no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from llama_core.checkpoint.digest import CheckpointDigest
from llama_core.checkpoint.manifest import Manifest
from llama_core.errors import ConfigError

# Proposed tokens of one step at most: so many more rows still cost a CPU less than a step of their own.
MAX_DRAFTS = 8

# Tokens of one step at most, where nobody says otherwise: a burst of prompts is read in few steps.
DEFAULT_STEP_TOKENS = 2048

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
BackendName = Literal["auto", "native", "fused", "torch"]
Quantization = Literal["none", "int8"]
PrefixCacheScope = Literal["key", "all"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that a rank needs to load and run its share. Plain and picklable: it crosses processes and nodes.

    vocab_size: the tokenizer's number of tokens. max_seq_len: prompt + generated tokens of one sequence at most.
    max_batch_size: sequences that run at once (slots). max_step_tokens: tokens of one step at most; a longer prompt is
    prefilled in chunks of what the running decodes leave of it. block_size: tokens in one block of the cache.
    kv_cache_bytes: cache memory of one rank; None takes what a full batch of full-length sequences needs, bounded by a
    share of what is free. verify_checksums: compare every shard's bytes with the CRC-32 that its archive states.
    manifest: the SHA-256 that params.json and the shards must have, before any of them is looked into.
    wants_digest: compute the digest of the checkpoint's contents even if all ranks see the same files. verified: files
    (`checkpoint.files.identity`) whose manifest and checksums have been verified, with their digest: no rank reads them
    again for that. expected: the contents that the first ranks loaded; ranks with any others refuse to load.
    speculation: let a step check tokens that repeat earlier ones. prefix_caching: compute a shared prefix once. Neither
    changes a request's tokens. prefix_cache_scope: which requests share cached blocks where API keys are configured: those of
    one key, or all. backend: what computes: "native" (C++) on a CPU, "fused" (CUDA graphs) on a GPU, or
    "torch"; "auto" is native on a CPU where it can be built. quantization: "int8" keeps the weights of linear layers as
    8-bit integers, one scale an output.
    """

    ckpt_dir: str
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    max_step_tokens: int = DEFAULT_STEP_TOKENS
    block_size: int = 16
    device: Device = "auto"
    dtype: DType = "auto"
    kv_cache_bytes: int | None = None
    verify_checksums: bool = True
    manifest: Manifest | None = None
    wants_digest: bool = False
    verified: Mapping[int, CheckpointDigest | None] = field(default_factory=dict)
    expected: CheckpointDigest | None = None
    speculation: bool = True
    prefix_caching: bool = True
    prefix_cache_scope: PrefixCacheScope = "key"
    backend: BackendName = "auto"
    quantization: Quantization = "none"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_seq_len", "max_batch_size", "max_step_tokens", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, is {value!r}", param=name)
        if self.max_seq_len < 2:
            raise ConfigError(
                "max_seq_len must be at least 2: a token of prompt and one that is generated", param="max_seq_len"
            )
        if self.max_step_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_batch_size ({self.max_batch_size}): "
                "every running sequence decodes one token a step",
                param="max_step_tokens",
            )
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise ConfigError("kv_cache_bytes must be positive", param="kv_cache_bytes")
        if self.device not in get_args(Device):
            raise ConfigError(f"device must be one of {', '.join(get_args(Device))}", param="device")
        if self.backend not in get_args(BackendName):
            raise ConfigError(f"backend must be one of {', '.join(get_args(BackendName))}", param="backend")
        if self.quantization not in get_args(Quantization):
            raise ConfigError(f"quantization must be one of {', '.join(get_args(Quantization))}", param="quantization")
        if self.prefix_cache_scope not in get_args(PrefixCacheScope):
            raise ConfigError(
                f"prefix_cache_scope must be one of {', '.join(get_args(PrefixCacheScope))}", param="prefix_cache_scope"
            )
        if self.dtype not in get_args(DType):
            raise ConfigError(f"dtype must be one of {', '.join(get_args(DType))}", param="dtype")

    @property
    def blocks_per_sequence(self) -> int:
        return math.ceil(self.max_seq_len / self.block_size)

    @property
    def max_drafts(self) -> int:
        """Tokens that the rows of one step may propose, all together."""
        return MAX_DRAFTS if self.speculation else 0

    @property
    def max_step_draws(self) -> int:
        """Tokens that one step draws at most: one a row, and one more for each draft."""
        return self.max_batch_size + self.max_drafts
