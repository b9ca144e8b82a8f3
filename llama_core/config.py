"""The settings with which a rank loads and runs its part of a model. Frozen, validated field by field, no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from llama_core.errors import ConfigError
from llama_core.files.adapter import MAX_LORA_RANK
from llama_core.files.digest import CheckpointDigest
from llama_core.files.manifest import Manifest
from llama_core.model.weight_formats import QUANTIZATIONS

# max_seq_len where neither the operator nor the checkpoint says: the default of Meta's reference model.
UNKNOWN_CONTEXT = 2048

# Draft tokens of one step at most: on a CPU, 8 more rows cost less than a step of their own.
MAX_DRAFTS = 8

# Default limit for the tokens of one step: a burst of prompts takes few steps.
DEFAULT_STEP_TOKENS = 2048

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
BackendName = Literal["auto", "native", "fused", "torch"]
CacheDType = Literal["auto", "fp8"]
PrefixCacheScope = Literal["key", "all"]
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "device": get_args(Device),
    "dtype": get_args(DType),
    "backend": get_args(BackendName),
    "quantization": QUANTIZATIONS,
    "kv_cache_dtype": get_args(CacheDType),
    "prefix_cache_scope": get_args(PrefixCacheScope),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Plain and picklable, because it is sent to other processes and nodes.

    vocab_size: number of token ids of the model. max_seq_len: prompt and generated tokens of one sequence at most.
    lowers_max_seq_len: the ranks lower max_seq_len to what their memory holds, instead of refusing to start.
    serves_with_fewer_ranks: they then leave memory for a group of one rank less.
    max_batch_size: sequences that run at once (slots). max_step_tokens: tokens of one step at most; a longer prompt is
    prefilled in chunks beside the running decodes. block_size: tokens in one block of the cache. kv_cache_bytes:
    cache memory of one rank; None: enough for a full batch of full-length sequences, limited by the free memory.
    kv_cache_dtype: of cached keys and values; "auto" is that of the activations, "fp8" one byte, for the fused backend.
    verify_checksums: compare the bytes of every shard with the CRC-32 inside it. manifest: the SHA-256 that every file must
    have before any file is parsed. wants_digest: compute the digest of the checkpoint even if all ranks see the same files.
    verified: identities of files (`files.digest.identity`) that ranks have verified, with their digest; ranks do not
    read these files again to verify them. expected: the digest of the checkpoint that the first ranks loaded; ranks that
    find another one refuse to load. speculation: let a step verify draft tokens. prefix_caching: compute a shared prefix
    once. Neither of the two changes a request's tokens. prefix_cache_scope: which requests share cached blocks and
    grammars where API keys are configured: those of one key, or all. backend: "native" (C++) on a CPU, "fused" (CUDA graphs)
    on a GPU, or "torch"; "auto" is native on a CPU where the library can be built, and fused on a GPU. quantization: the
    weight format of linear layers, one of `QUANTIZATIONS`: "auto" is as the checkpoint stores each matrix, "none" the
    model's dtype; the others quantize every matrix. batch_invariant: the fused backend computes a
    request's tokens with the same bits beside any other requests, which is slower; the native backend always does.
    max_loras: LoRA adapters that the ranks hold at once, 0 for none, of at most max_lora_rank each.
    tokenizer_path: where rank 0 finds the vocabulary for grammars, and stop_ids: what may follow a complete answer; without
    them no request may have a grammar.
    """

    ckpt_dir: str
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    max_step_tokens: int = DEFAULT_STEP_TOKENS
    lowers_max_seq_len: bool = False
    serves_with_fewer_ranks: bool = False
    block_size: int = 16
    device: Device = "auto"
    dtype: DType = "auto"
    kv_cache_bytes: int | None = None
    kv_cache_dtype: CacheDType = "auto"
    verify_checksums: bool = True
    manifest: Manifest | None = None
    wants_digest: bool = False
    verified: Mapping[int, CheckpointDigest | None] = field(default_factory=dict)
    expected: CheckpointDigest | None = None
    speculation: bool = True
    prefix_caching: bool = True
    prefix_cache_scope: PrefixCacheScope = "key"
    backend: BackendName = "auto"
    quantization: str = "auto"
    batch_invariant: bool = False
    max_loras: int = 0
    max_lora_rank: int = 16
    tokenizer_path: str = ""
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_seq_len", "max_batch_size", "max_step_tokens", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, is {value!r}", param=name)
        if self.max_seq_len < 2:
            raise ConfigError(
                "max_seq_len must be at least 2: one prompt token and one generated token", param="max_seq_len"
            )
        if self.max_step_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_batch_size ({self.max_batch_size}): "
                "every running sequence decodes one token a step",
                param="max_step_tokens",
            )
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise ConfigError("kv_cache_bytes must be positive", param="kv_cache_bytes")
        if self.max_loras < 0 or not 0 < self.max_lora_rank <= MAX_LORA_RANK:
            raise ConfigError(f"max_lora_rank must be from 1 to {MAX_LORA_RANK}", param="max_lora_rank")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}", param=name)

    @property
    def blocks_per_sequence(self) -> int:
        return math.ceil(self.max_seq_len / self.block_size)

    @property
    def max_drafts(self) -> int:
        """Draft tokens of all rows of one step together at most."""
        return MAX_DRAFTS if self.speculation else 0

    @property
    def max_step_samples(self) -> int:
        """Tokens that one step samples at most: one for each row, and one more for each draft token."""
        return self.max_batch_size + self.max_drafts
