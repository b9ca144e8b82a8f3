"""LoRA adapters in PEFT's files, `adapter_config.json` and `adapter_model.safetensors`, checked against their base. Reads no
weight; no torch.

Where an adapter has a pair of matrices A [rank, inputs] and B [outputs, rank], the product of a linear layer with x becomes
W x + scale * B (A x) (Hu et al. 2021).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, Final

from llama_core.errors import ConfigError
from llama_core.files.digest import CheckpointDigest, sha256_of
from llama_core.files.hf.files import Located, read_header
from llama_core.files.json_fields import read_object
from llama_core.model.config import ModelConfig
from llama_core.model.fields import Fields, shown
from llama_core.model.weights import WeightSpec, weight_specs

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_LORA_RANK: Final = 128
MAX_SCALE: Final = 1e6
_MAX_CONFIG_BYTES: Final = 1_000_000
_MAX_QUANTIFIERS: Final = 3  # of one key: a match takes time that grows with the name's length to this power
_MAX_KEYS: Final = 1000  # of a pattern, which are compared with the name of every layer
_PREFIX: Final = "base_model.model."
_DTYPES: Final = ("F32", "BF16", "F16")
# Fields of PEFT's LoraConfig that change the computation, with what they must be where they are given.
_REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "use_qalora": (False,),
    # Others change the base's weights when PEFT loads the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(
        (
            *("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication", "arrow_config"),
            *("alora_invocation_tokens", "velora_config", "monteclora_config", "use_bdlora", "kasa_config"),
        ),
        ((), [], {}, False),
    ),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """The matrices of one linear layer, by their places in the file, and the factor of their product."""

    a: Located
    b: Located
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """digest: of both files' contents, by which everything names the adapter. pairs: by the weight's name in `weight_specs`.
    base: the name or path of the model that it was trained on; "" if it is not given."""

    folder: str
    digest: str
    pairs: Mapping[str, Pair]
    base: str = ""


def open_adapter(folder: str | Path, model: ModelConfig, max_rank: int) -> Adapter:
    """Raises ConfigError or CheckpointError that names the file, and the field or tensor, unless the base can have the adapter.

    max_rank: of every pair at most.
    """
    directory = Path(folder)
    config, weights = directory / CONFIG, directory / WEIGHTS
    if not weights.exists() and (directory / "adapter_model.bin").exists():
        raise ConfigError(f"{weights}: no such file; adapter_model.bin is not read: save_pretrained writes safetensors")
    for file in (config, weights):
        if not file.is_file():  # a pipe would be waited for
            raise ConfigError(f"{file}: no such file")
    given = Fields(read_object(config, _MAX_CONFIG_BYTES), str(config))
    _check_supported(given)
    pairs = _pairs(given, {each.name: each for each in read_header(weights)}, weight_specs(model), weights, max_rank)
    digest = CheckpointDigest(tuple((file.name, sha256_of(file)) for file in (config, weights)))
    return Adapter(str(directory), digest.value, pairs, given.text("base_model_name_or_path", ""))


def _check_supported(given: Fields) -> None:
    if given.text("peft_type", "LORA") != "LORA":
        raise given.wrong("peft_type", "LORA")
    for name, allowed in _REFUSED.items():
        if name in given.given and given.given[name] not in allowed:
            raise ConfigError(f"{given.source}: field {name!r} is not supported, is {shown(given.given[name])}")


def _pairs(
    given: Fields, located: Mapping[str, Located], specs: Mapping[str, WeightSpec], file: Path, max_rank: int
) -> dict[str, Pair]:
    pairs, used = {}, set[str]()
    rank_of, alpha_of = _pattern(given, "rank_pattern"), _pattern(given, "alpha_pattern")
    layers = given.given.get("layers_to_transform")
    for name, spec in specs.items():
        if not (spec.takes_adapters and name.startswith("layers.") and name.endswith(".weight")):
            continue
        module = spec.hugging_face.removesuffix(".weight")
        names = [f"{_PREFIX}{module}.lora_{half}.weight" for half in "AB"]
        used.update(names)
        a, b = map(located.get, names)
        if a is None and b is None:
            continue
        if a is None or b is None:
            raise ConfigError(f"{file}: {module} has lora_{'B' if a is None else 'A'} alone, without its other matrix")
        rank = rank_of(module) or given.integer("r", most=MAX_LORA_RANK)
        outputs, inputs = spec.stored_shape
        for each, shape in ((a, (rank, inputs)), (b, (outputs, rank))):
            if each.shape != shape:
                raise ConfigError(
                    f"{file}: {each.name} has shape {list(each.shape)}, expected {list(shape)} for this base and rank {rank}"
                )
            if each.dtype not in _DTYPES:
                raise ConfigError(f"{file}: {each.name} has dtype {each.dtype}, expected one of {', '.join(_DTYPES)}")
        if rank > max_rank:
            raise ConfigError(
                f"{given.source}: rank {rank} is over max_lora_rank, {max_rank}: raise it", param="max_lora_rank"
            )
        layer = int(name.split(".")[1])
        if layers is not None and layers != [] and layer not in (layers if isinstance(layers, list) else [layers]):
            raise ConfigError(f"{file}: {a.name} is of a layer that field 'layers_to_transform' leaves out")
        alpha = alpha_of(module)
        if alpha is None and (alpha := given.given.get("lora_alpha")) is None:
            raise ConfigError(f"{given.source}: field 'lora_alpha' is missing")
        if not _is_number(alpha):  # PEFT computes with 0 and with negative numbers too
            raise given.wrong("lora_alpha", "a number")
        scale = alpha / (sqrt(rank) if given.flag("use_rslora") else rank)
        if not abs(scale) <= MAX_SCALE:
            raise ConfigError(f"{given.source}: lora_alpha divided by the rank must be at most {MAX_SCALE:g}")
        pairs[name] = Pair(a, b, scale)
    if left := [name for name in located if name not in used]:
        raise ConfigError(
            f"{file}: {shown(left[0])} is not lora_A or lora_B of one of the base's linear layers; "
            "embeddings and lm_head cannot have adapters"
        )
    if not pairs:
        raise ConfigError(f"{file}: has no adapter")
    return pairs


def _pattern(given: Fields, field: str) -> Callable[[str], Any]:
    """What a pattern says of a module, as PEFT reads it: by its first key that matches the end of the name, else
    None."""
    pattern = given.given.get(field, {})
    if not isinstance(pattern, dict) or any(not _is_number(each) for each in pattern.values()):
        raise given.wrong(field, "an object of numbers")
    if len(pattern) > _MAX_KEYS:
        raise ConfigError(f"{given.source}: field {field!r} has {len(pattern)} keys, at most {_MAX_KEYS} are read")
    if any(len(re.findall(r"[*+?{]", key)) > _MAX_QUANTIFIERS or re.search(r"\)[*+{]", key) for key in pattern):
        raise ConfigError(
            f"{given.source}: field {field!r}: a key repeats a group, or has more than {_MAX_QUANTIFIERS} quantifiers"
        )
    try:
        keys = [(re.compile(rf"(.*\.)?({key})$"), each) for key, each in pattern.items()]
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{given.source}: field {field!r}: not a regular expression: {error}") from None
    return lambda module: next((each for key, each in keys if key.match(module)), None)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9
