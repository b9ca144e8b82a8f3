"""The names of weights in GGUF files, and the order of their query and key rows. Needs no torch."""

import re
from typing import Final

from llama_core.files.weights import EMBEDDING, OUTPUT

# Architecture -> whether its query and key rows have each head's halves side by side, as Hugging Face's models. The converter
# reorders those of "llama" to adjacent pairs, which is Meta's order and ours.
ARCHITECTURES: Final = {"llama": False, "qwen2": True, "qwen3": True}

ROPE_FACTORS = "rope_freqs.weight"  # the frequency of each pair is divided by it; no weight of a layer
TOKEN_EMBEDDING, OUTPUT_LAYER = "token_embd.weight", "output.weight"
_TOP: Final = {EMBEDDING: TOKEN_EMBEDDING, "norm.weight": "output_norm.weight", OUTPUT: OUTPUT_LAYER}
_MODULES: Final = {
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention_norm": "attn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "ffn_norm": "ffn_norm",
}
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_ROTATED = re.compile(r".*\.attention\.(wq|wk|q_norm|k_norm)\.(weight|bias)")


def gguf_name(name: str) -> str:
    """The name in the file of one of `weights.weight_specs`. The output layer of a tied model has none."""
    match = _IN_LAYER.fullmatch(name)
    return _TOP[name] if match is None else f"blk.{match[1]}.{_MODULES[match[2]]}.{match[3]}"


def is_rotated(name: str) -> bool:
    """Whether the rows of the weight are those of heads that the rotary embedding turns."""
    return _ROTATED.fullmatch(name) is not None
