"""Damaged Hugging Face folders: safetensors files, their index, and config.json."""

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random

from llama_core.files.digest import sha256_of
from llama_core.files.manifest import FILE_NAME
from tests.fuzz.damage import Damage
from tests.fuzz.file_worker import FOLDER
from tests.fuzz.json_damage import VALUES, damage_json, damaged
from tests.support.hugging_face import CONFIGS, random_weights, read, write

INDEX = "model.safetensors.index.json"
CONFIG = CONFIGS["qwen3"]
_ROPE_FIELDS = (
    *("rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "mscale"),
    *("high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale_all_dim", "truncate", "unknown"),
)
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_CONFIG_FIELDS = (
    *("rope_scaling", "rope_theta", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "architectures", "quantization_config"),
    *("num_experts", "partial_rotary_factor", "model_type", "head_dim", "eos_token_id"),
)


@cache
def files() -> Mapping[str, bytes]:
    """The undamaged folder: two safetensors files, their index, config.json and SHA256SUMS."""
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), CONFIG, random_weights(read(CONFIG)), 2)
        lines = [f"{sha256_of(file)}  {file.name}\n" for file in sorted(folder.iterdir())]
        (folder / FILE_NAME).write_text("".join(lines))
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def put_folder(directory: Path) -> None:
    """Write the undamaged folder below `directory`."""
    (directory / FOLDER).mkdir(exist_ok=True)
    for name, content in files().items():
        (directory / FOLDER / name).write_bytes(content)


def damages() -> dict[str, Damage]:
    """By kind, as `damage.damages`; names have the folder before them."""
    shards = sorted(name for name in files() if name.endswith(".safetensors"))

    def safetensors(draw: Random) -> tuple[str, bytes, bool]:
        if draw.random() < 0.2:
            return f"{FOLDER}/{INDEX}", damage_json(files()[INDEX], draw), False
        name = draw.choice(shards)
        return f"{FOLDER}/{name}", _damage_shard(files()[name], files()[draw.choice(shards)], draw), False

    def config(draw: Random) -> tuple[str, bytes, bool]:
        return f"{FOLDER}/config.json", _damage_config(files()["config.json"], draw), False

    return {"safetensors": safetensors, "config": config}


def _damage_shard(content: bytes, other: bytes, draw: Random) -> bytes:
    how, begin = draw.random(), 8 + int.from_bytes(content[:8], "little")
    if how < 0.4:
        return damaged(content, draw, 0, draw.choice((8, begin, begin, len(content))))
    if how < 0.55:
        cut = content[: draw.randrange(len(content))]
        return draw.choice([cut, cut, content + draw.randbytes(draw.randint(1, 9)), b"", other, draw.randbytes(2000), bytes(8),
                            b"\x02" + bytes(7) + b"{}", content * 2])  # fmt: skip
    text = content[8:begin]
    if draw.random() < 0.6:
        return _framed(damage_json(text, draw)) + content[begin:]
    header = json.loads(text)
    entry, another = (draw.choice([each for name, each in header.items() if name != "__metadata__"]) for _ in range(2))
    if draw.random() < 0.5:
        entry["data_offsets"][draw.randrange(2)] += draw.choice((-64, -1, 1, 4, 64, 2**31, 2**63))
    else:
        entry["data_offsets"], another["data_offsets"] = another["data_offsets"], entry["data_offsets"]
    return _framed(json.dumps(header).encode()) + content[begin:]


def _framed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def _damage_config(content: bytes, draw: Random) -> bytes:
    if draw.random() < 0.7:
        return damage_json(content, draw, _CONFIG_FIELDS)
    rope = {name: draw.choice((*VALUES, 2.0, 4, 64)) for name in draw.sample(_ROPE_FIELDS, draw.randint(1, 5))}
    rope[draw.choice(("rope_type", "type"))] = draw.choice(_ROPE_TYPES)
    config = json.loads(content)
    config.pop("rope_parameters", None)
    return json.dumps(config | {draw.choice(("rope_scaling", "rope_parameters")): rope}).encode()
