"""What a family of checkpoints tells the readers of its files. A family is a file in `families/`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llama_core.model.fields import Fields
from llama_core.model.operations import FULL_ATTENTION, Layer
from llama_core.model.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class Given:
    """What a file says of its layers. windows: one a layer, () for none. qkv_bias, out_bias, mlp_bias: of the attention's first
    product, of its last one, and of the feed-forward layer's. fields: of config.json, or what GGUF metadata has of those that
    the family reads."""

    rope: RopeConfig
    windows: tuple[int, ...]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    fields: Fields

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else FULL_ATTENTION


def _each(fields: Fields, layer: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Family:
    """model_type, architectures: in config.json. layer: what a file says, number of a layer -> its operations.

    kv_heads, head_dim, positions, theta, norm_eps, tied, window: of transformers' configuration class, for fields that
    config.json lacks; None for kv_heads is the number of query heads, for head_dim the hidden size divided by it; window is
    None for a family without sliding_window, and 0 for no default. has_window_flag: sliding_window needs use_sliding_window.
    has_layer_types: layer_types may mix full and sliding layers. is_sliding: whether a layer is, where layer_types is absent.
    qkv_bias: q, k and v always have biases. optional_bias: the fields that may turn biases on. is_partial:
    partial_rotary_factor counts.

    reads: further fields of config.json that count, with their names in GGUF, "" for those that GGUF lacks. model: fields of
    ModelConfig that are one of these, a number. gguf: the architecture's name in GGUF files; "" if they are not read.
    gguf_halves: there the rows of q and k have each head's halves side by side, as in Hugging Face's files, not in Meta's
    order.
    """

    model_type: str
    architectures: tuple[str, ...]
    layer: Callable[[Given, int], Layer]
    positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    theta: float = 10000.0
    norm_eps: float = 1e-6
    tied: bool = False
    window: int | None = None
    has_window_flag: bool = False
    has_layer_types: bool = False
    is_sliding: Callable[[Fields, int], bool] = _each
    qkv_bias: bool = False
    optional_bias: tuple[str, ...] = ()
    is_partial: bool = False
    reads: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, str] = field(default_factory=dict)
    gguf: str = ""
    gguf_halves: bool = False
