"""Damaged Hugging Face folders: safetensors files, their index, and config.json."""

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from llama_core.checkpoint.digest import sha256_of
from llama_core.checkpoint.manifest import FILE_NAME
from tests.fuzz.damage import VALUES, Damage, damage_params, damaged
from tests.fuzz.file_worker import FOLDER
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
            return f"{FOLDER}/{INDEX}", _damage_index(files()[INDEX], draw), False
        name = draw.choice(shards)
        return f"{FOLDER}/{name}", _damage_shard(files()[name], files()[draw.choice(shards)], draw), False

    def config(draw: Random) -> tuple[str, bytes, bool]:
        return f"{FOLDER}/config.json", _damage_config(files()["config.json"], draw), False

    return {"safetensors": safetensors, "config": config}


def _damage_shard(content: bytes, other: bytes, draw: Random) -> bytes:
    how = draw.random()
    begin = 8 + int.from_bytes(content[:8], "little")
    if how < 0.1:
        return damaged(content, draw)
    if how < 0.35:
        return damaged(content, draw, 0, begin)
    if how < 0.4:
        return damaged(content, draw, 0, 8)
    if how < 0.5:
        return draw.choice([content[: draw.randrange(len(content))], content + draw.randbytes(draw.randint(1, 9))])
    if how < 0.55:
        return draw.choice([b"", other, draw.randbytes(2000), bytes(8), b"\x02" + bytes(7) + b"{}", content * 2])
    header = json.loads(content[8:begin])
    _change_header(header, draw)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[begin:]


def _change_header(header: dict[str, Any], draw: Random) -> None:
    """Lies that are valid JSON: other offsets, shapes, dtypes and names."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        names = [name for name, entry in header.items() if isinstance(entry, dict) and _is_intact(entry)]
        name, another = draw.choice(names), draw.choice(names)
        entry = header[name]
        match draw.randrange(9):
            case 0:
                entry["data_offsets"][draw.randrange(2)] += draw.choice((-64, -1, 1, 4, 64, 2**31, 2**63))
            case 1:
                entry["data_offsets"], header[another]["data_offsets"] = (
                    header[another]["data_offsets"],
                    entry["data_offsets"],
                )
            case 2:
                entry["shape"] = draw.choice([[], [0], entry["shape"][::-1], [2**40, 2**40], [-1], [1.5], [1] * 100])
            case 3:
                entry["dtype"] = draw.choice(["BF16", "F16", "I32", "F64", "F4", "F8_E4M3", "f32", "", None, 3])
            case 4:
                header[draw.choice([another, "x", "x" * 5000, "\u2028", "model.layers.9.x"])] = header.pop(name)
                return
            case 5:
                entry[draw.choice(["dtype", "shape", "data_offsets", "more"])] = draw.choice(VALUES)
            case 6:
                header[draw.choice([name, "__metadata__", "new"])] = draw.choice(VALUES)
                return
            case 7:
                del header[name]
                return
            case _:
                header["new"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def _is_intact(entry: dict[str, Any]) -> bool:
    lists = (entry.get("shape"), entry.get("data_offsets"))
    return all(isinstance(value, list) and value for value in lists) and len(entry["data_offsets"]) == 2


def _damage_index(content: bytes, draw: Random) -> bytes:
    if draw.random() < 0.4:
        return damaged(content, draw)
    index = json.loads(content)
    names = list(index["weight_map"])
    strange = [
        "../x.safetensors",
        "/etc/passwd",
        "x.safetensors",
        "..",
        "",
        "\0.safetensors",
        "x" * 5000 + ".safetensors",
    ]
    for _ in range(draw.choice((1, 2))):
        if not isinstance(index["weight_map"], dict):
            break
        match draw.randrange(4):
            case 0:
                index["weight_map"].pop(draw.choice(names), None)
            case 1:
                index["weight_map"]["x" * draw.choice((1, 5000))] = draw.choice(list(index["weight_map"].values()))
            case 2:
                index["weight_map"][draw.choice(names)] = draw.choice([*strange, *VALUES])
            case _:
                index = {"weight_map": draw.choice(VALUES)} if draw.random() < 0.2 else index
    return json.dumps(index).encode()


def _damage_config(content: bytes, draw: Random) -> bytes:
    if draw.random() < 0.7:
        return damage_params(content, draw, _CONFIG_FIELDS)
    rope = {name: draw.choice((*VALUES, 2.0, 4, 64)) for name in draw.sample(_ROPE_FIELDS, draw.randint(1, 5))}
    rope[draw.choice(("rope_type", "type"))] = draw.choice(_ROPE_TYPES)
    config = json.loads(content)
    config.pop("rope_parameters", None)
    return json.dumps(config | {draw.choice(("rope_scaling", "rope_parameters")): rope}).encode()
