"""GGUF files by the gguf package, an independent writer with its own quantization: small random models of the served
architectures, and files without weights, whose vocabularies are those of small tokenizers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import sentencepiece
from gguf import GGMLQuantizationType as Encoding
from safetensors.numpy import load_file

from llama_core.text.tokenizers.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from tests.conftest import GOLDEN
from tests.support.vocabularies import FAMILIES

Array = npt.NDArray[np.float32]


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Array],
    encodings: Mapping[str, Encoding] | Encoding = Encoding.F32,
    split: int = 0,
) -> Path:
    """Write one model. metadata: keys as in the file; text, numbers, truth values, and lists of them. encodings: one for all
    tensors, or by name, F32 for the others. split: tensors of one part at most, 0 for a single file. Returns the first file.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in metadata.items():
        if value == []:
            continue
        kind = gguf.GGUFValueType.get_type(value)
        if kind is gguf.GGUFValueType.INT32 and not isinstance(value, bool):
            kind = gguf.GGUFValueType.UINT32
        sub = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, sub)
    for name, values in tensors.items():
        encoding = encodings.get(name, Encoding.F32) if isinstance(encodings, Mapping) else encodings
        if values.ndim == 1 and encoding not in (Encoding.F32, Encoding.F16):
            encoding = Encoding.F32  # as llama.cpp's converter has it
        writer.add_tensor(name, encode(values, encoding), raw_dtype=encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return parts[0] if parts else path


def encode(values: Array, encoding: Encoding) -> npt.NDArray[Any]:
    """The blocks of `values`, as the file holds them."""
    if encoding is Encoding.F16:
        return values.astype(np.float16)
    if encoding in _UNWRITABLE:
        return _random_blocks(values.shape, encoding)
    blocks: npt.NDArray[Any] = gguf.quants.quantize(values, encoding)
    return blocks


# Encodings that the gguf package reads but cannot write. Their blocks are drawn from those that llama.cpp's quantizer made of a
# random model, or have random bytes beside a small power of two or float16.
_MADE = Path(__file__).parents[1] / "data" / "llama_cpp_blocks.safetensors"
_UNWRITABLE = (
    Encoding.Q2_K, Encoding.Q3_K, Encoding.Q4_K, Encoding.Q5_K, Encoding.Q6_K, Encoding.IQ4_NL, Encoding.IQ4_XS, Encoding.MXFP4,
)  # fmt: skip


def _random_blocks(shape: tuple[int, ...], encoding: Encoding) -> npt.NDArray[np.uint8]:
    values, size = gguf.GGML_QUANT_SIZES[encoding]
    draw, wanted = np.random.default_rng(int(np.prod(shape))), (*shape[:-1], shape[-1] // values)
    made = load_file(_MADE)
    if encoding.name in made:
        blocks = made[encoding.name][draw.integers(0, len(made[encoding.name]), wanted)]
    else:
        blocks = draw.integers(0, 256, (*wanted, size), dtype=np.uint8)
    if encoding is Encoding.MXFP4:
        blocks[..., 0] = draw.integers(118, 124, wanted)  # less 128: the exponent of half the scale
    if encoding is Encoding.Q2_K:
        blocks[..., 80:84] = draw.normal(scale=1e-3, size=(*wanted, 2)).astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


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


PRE_OF_FAMILY = {"llama3": "llama-bpe", "smollm": "smollm", "qwen": "qwen2"}
MODEL = GOLDEN / "mp1" / "tokenizer.model"
PIECES = sentencepiece.SentencePieceProcessor(model_file=str(MODEL))


def write_vocabulary(path: Path, **fields: Any) -> Path:
    """A file without weights. fields: the keys behind tokenizer.ggml."""
    return write_gguf(path, "llama", {f"tokenizer.ggml.{name}": value for name, value in fields.items()}, {})


def byte_level_fields(family: str) -> dict[str, Any]:
    tokenizer, config = FAMILIES[family]()
    content = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    kinds = [NORMAL] * len(vocab)
    for token_id, token in added.items():
        kinds[token_id] = CONTROL if token.special else USER_DEFINED
    return {
        "model": "gpt2",
        "pre": PRE_OF_FAMILY[family],
        "tokens": sorted(vocab, key=lambda token: vocab[token]),
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "eos_token_id": vocab[config["eos_token"]],
    } | ({"bos_token_id": vocab[config["bos_token"]]} if config["bos_token"] else {})


def sentencepiece_fields() -> dict[str, Any]:
    ids = range(PIECES.vocab_size())
    kinds = [
        UNKNOWN if PIECES.is_unknown(i) else CONTROL if PIECES.is_control(i) else BYTE if PIECES.is_byte(i) else NORMAL
        for i in ids
    ]
    return {
        "model": "llama",
        "tokens": [PIECES.id_to_piece(i) for i in ids],
        "scores": [PIECES.get_score(i) for i in ids],
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
