"""Reads the architecture from the metadata of a GGUF file. Needs no torch; every error names the file and the key."""

from llama_core.errors import ConfigError
from llama_core.files.gguf.keys import GgufKeys
from llama_core.files.gguf.model import GgufModel
from llama_core.files.gguf.rope import read_rope
from llama_core.model_config import MAX_LAYERS, ModelConfig

_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


def gguf_config(model: GgufModel, vocab_size: int) -> ModelConfig:
    """The architecture. vocab_size: the tokenizer's. Raises ConfigError that names the file and the key."""
    keys = GgufKeys(model)
    keys.refuse_unknown_models()
    heads = keys.integer("attention.head_count")
    dim = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", dim // heads or 1)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.fault("attention.value_length", f"must be the key length {head_dim}")
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise keys.fault("rope.dimension_count", f"must be the width {head_dim} of a head: others are not supported")
    layers = keys.integer("block_count", most=MAX_LAYERS)
    tensors = model.tensors
    rope, context = read_rope(keys, model, head_dim)
    return ModelConfig(
        dim=dim,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        hidden_dim=keys.integer("feed_forward_length"),
        vocab_size=_vocab_size(model, vocab_size),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tied_embeddings=_OUTPUT not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=keys.architecture == "qwen3",
        windows=_windows(keys, layers),
        context_length=context,
    ).check(str(model.path))


def stop_ids(model: GgufModel) -> frozenset[int]:
    """The ids of the tokens that end a text, a turn or a message. Raises ConfigError for one that is no id."""
    keys = GgufKeys(model)
    found = set()
    for name in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in model.metadata:
            found.add(keys.plain_integer(key))
    return frozenset(found)


def _vocab_size(model: GgufModel, tokenizer_size: int) -> int:
    """Rows of the embedding, of which some models have more than tokens."""
    embedding = model.tensors.get(_EMBEDDING)
    if embedding is None:
        raise ConfigError(f"{model.path}: has no tensor {_EMBEDDING}: a file without a model's weights")
    if embedding.shape[0] < tokenizer_size:
        raise ConfigError(
            f"{model.path}: {_EMBEDDING} has {embedding.shape[0]} rows, but the tokenizer has {tokenizer_size} tokens: "
            "tokenizer and checkpoint belong to different models"
        )
    return embedding.shape[0]


def _windows(keys: GgufKeys, layers: int) -> tuple[int, ...]:
    """The window of each layer; () if none has one."""
    window = keys.integer("attention.sliding_window", 0, least=0)
    pattern = keys.value("attention.sliding_window_pattern")
    if not window:
        return ()
    if pattern is None:
        return (window,) * layers
    if not isinstance(pattern, list) or len(pattern) != layers or not all(isinstance(each, bool) for each in pattern):
        raise keys.fault("attention.sliding_window_pattern", f"must be {layers} truth values, one a layer")
    return tuple(window if has_window else 0 for has_window in pattern)
