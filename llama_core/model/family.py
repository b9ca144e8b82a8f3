"""What a family of checkpoints tells the readers of its files. A family is a file in `families/`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llama_core.model.fields import Fields
from llama_core.model.operations import Layer
from llama_core.model.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class Given:
    """What a file says of its layers. windows: one a layer. qkv_bias, out_bias, mlp_bias: of the attention's first product, of
    its last one, and of the feed-forward layer's. fields: of config.json, or what GGUF has of those that the family reads.
    local_rope: of layers with a window, where it is another one."""

    rope: RopeConfig
    windows: tuple[int, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fields: Fields = field(default_factory=lambda: Fields({}, ""))
    local_rope: RopeConfig | None = None

    def rope_of(self, i: int) -> RopeConfig:
        """Of layer `i`."""
        return self.local_rope if self.local_rope is not None and self.windows[i] else self.rope


@dataclass(frozen=True, slots=True)
class Family:
    """model_type: in config.json. layer: what a file says, number of a layer -> its operations.

    defaults: of transformers' configuration class, for fields that config.json lacks. A family has windows if sliding_window is
    among them, chunks if attention_chunk_size is, a flag for windows if use_sliding_window is, and full layers beside sliding
    ones if layer_types is. is_sliding: whether a layer is, or has chunks, where layer_types is absent. qkv_bias: q, k and v
    always have biases. optional_bias: the fields that may turn biases on.

    rope_types: what the family calls rope types. local_theta: the field with the base of layers with a window, which have a
    rotary embedding of their own; "" if all layers have the same. activations: of the feed-forward layer. reads: further fields
    that count, with their keys in GGUF, "" for those that GGUF lacks; other families refuse them. model: those of ModelConfig
    that follow from these. wrappers: model_type of models with images whose text_config is of the family. gguf: the
    architecture's name in GGUF files; "" if they are not read. gguf_has_experts: of two families with this name that with
    experts. gguf_is_neox: there the rows of q and k have each head's halves side by side, as in Hugging Face's files.
    """

    model_type: str
    layer: Callable[[Given, int], Layer]
    defaults: Mapping[str, Any]
    is_sliding: Callable[[Fields, int], bool] = lambda fields, layer: True
    qkv_bias: bool = False
    optional_bias: tuple[str, ...] = ()
    rope_types: Mapping[str, str] = field(default_factory=dict)
    local_theta: str = ""
    activations: tuple[str, ...] = ("silu", "swish")
    reads: Mapping[str, str] = field(default_factory=dict)
    model: Callable[[Fields], Mapping[str, Any]] = lambda fields: {}
    wrappers: tuple[str, ...] = ()
    gguf: str = ""
    gguf_has_experts: bool = False
    gguf_is_neox: bool = False
