"""Small random GGUF models of the architectures that are served."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Encoding

from tests.support.gguf_files import Array, write_gguf

DIM, HEADS, KV_HEADS, HEAD, HIDDEN, LAYERS, VOCABULARY = 256, 8, 4, 32, 256, 2, 96
KEYS: Mapping[str, Any] = {
    "block_count": LAYERS,
    "context_length": 512,
    "embedding_length": DIM,
    "feed_forward_length": HIDDEN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": HEAD,
}


def write_model(
    directory: Path,
    architecture: str = "llama",
    *,
    encoding: Mapping[str, Encoding] | Encoding = Encoding.F32,
    keys: Mapping[str, Any] | None = None,
    plain: Mapping[str, Any] | None = None,
    more: Mapping[str, Array] | None = None,
    without: tuple[str, ...] = (),
    bias: bool = False,
    tied: bool = False,
    split: int = 0,
    seed: int = 0,
) -> Path:
    """Write `directory`/m.gguf. keys: metadata below the architecture's name, plain: other metadata. more, without: tensors
    that are added or changed, and left out. Returns the file, of a split model the first part."""
    directory.mkdir(parents=True, exist_ok=True)
    metadata = {f"{architecture}.{key}": value for key, value in (dict(KEYS) | dict(keys or {})).items()}
    tensors = random_tensors(architecture, bias=bias, seed=seed) | dict(more or {})
    left_out = {*without, *(["output.weight"] if tied else [])}
    kept = {name: values for name, values in tensors.items() if name not in left_out}
    return write_gguf(directory / "m.gguf", architecture, metadata | dict(plain or {}), kept, encoding, split)


def random_tensors(architecture: str, *, bias: bool = False, seed: int = 0) -> dict[str, Array]:
    """Under the file's names, in the file's order of rows."""
    draw = np.random.default_rng(seed)
    queries, keys = HEADS * HEAD, KV_HEADS * HEAD
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (DIM,), "ffn_norm.weight": (DIM,), "attn_q.weight": (queries, DIM),
        "attn_k.weight": (keys, DIM), "attn_v.weight": (keys, DIM), "attn_output.weight": (DIM, queries),
        "ffn_gate.weight": (HIDDEN, DIM), "ffn_up.weight": (HIDDEN, DIM), "ffn_down.weight": (DIM, HIDDEN),
    }  # fmt: skip
    if bias:
        layer |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    if architecture == "qwen3":
        layer |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, DIM), "output_norm.weight": (DIM,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    shapes["output.weight"] = (VOCABULARY, DIM)
    return {name: _values(draw, shape) for name, shape in shapes.items()}


def _values(draw: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Norms and biases near 1, matrices large enough that the next token depends on the previous ones."""
    values = draw.standard_normal(shape, dtype=np.float32)
    return np.float32(1) + np.float32(0.1) * values if len(shape) == 1 else np.float32(0.25) * values
