"""Hugging Face folders load on any number of ranks with Meta's values, and damaged ones are refused by name."""

import codecs
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core.checkpoint.hugging_face import HuggingFaceCheckpoint
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import CheckpointError
from llama_core.files.digest import sha256_of
from llama_core.files.manifest import Manifest
from llama_core.text.registry import load_tokenizer
from llama_core.text.template.files import find_template
from tests.support import hugging_face
from tests.support.checkpoints import load, peak_ratio
from tests.support.hugging_face import CONFIGS, in_hugging_faces_layout, random_weights, read, write
from tests.support.vocabularies import make_family

# `in_hugging_faces_layout` knows the names of their weights.
LLAMAS = [name for name, each in CONFIGS.items() if each["model_type"] in ("llama", "mistral", "qwen2", "qwen3")]


@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.parametrize("num_files", [1, 3])
def test_weights_are_read_in_metas_order(tmp_path: Path, name: str, num_files: int) -> None:
    """test_files_onto_ranks.py has the parts of ranks."""
    weights = random_weights(read(CONFIGS[name]))
    write(tmp_path, CONFIGS[name], weights, num_files)
    got = load(tmp_path)
    assert got.keys() == weights.keys() and all(torch.equal(got[name], weights[name]) for name in got)


def test_rotary_buffers_and_missing_prefixes_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    config = read(CONFIGS["llama2"])
    weights = random_weights(config)
    write(tmp_path, CONFIGS["llama2"], weights)
    stored = {name.removeprefix("model."): w for name, w in in_hugging_faces_layout(weights, config).items()}
    hugging_face.write_files(tmp_path, stored | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, 1)
    assert all(torch.equal(values, weights[name]) for name, values in load(tmp_path).items())


def test_a_tied_model_may_store_its_output_layer_if_it_equals_the_embedding(tmp_path: Path) -> None:
    config = read(CONFIGS["qwen2"])
    weights = random_weights(config)
    write(tmp_path, CONFIGS["qwen2"], weights)
    stored = in_hugging_faces_layout(weights, config)
    embedding = stored["model.embed_tokens.weight"]
    hugging_face.write_files(tmp_path, stored | {"lm_head.weight": embedding.clone()}, 1)
    assert torch.equal(load(tmp_path)["output.weight"], embedding)
    hugging_face.write_files(tmp_path, stored | {"lm_head.weight": 2 * embedding}, 1)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding"):
        load(tmp_path)
    del stored["model.embed_tokens.weight"]
    hugging_face.write_files(tmp_path, stored | {"lm_head.weight": embedding.clone()}, 1)
    assert torch.equal(load(tmp_path)["tok_embeddings.weight"], embedding)


@pytest.mark.parametrize("half", ["lm_head.weight", "model.embed_tokens.weight"])
def test_an_index_may_list_a_half_of_a_tied_pair_that_no_file_has(tmp_path: Path, half: str) -> None:
    for name in ("qwen2", "llama2"):
        config = read(CONFIGS[name])
        weights = random_weights(config)
        stored = in_hugging_faces_layout(weights, config)
        stored |= {"lm_head.weight": weights["output.weight"].clone()}
        write(tmp_path / name, CONFIGS[name], weights)
        del stored[half]
        (tmp_path / name / "model.safetensors").unlink()
        hugging_face.write_files(tmp_path / name, stored, 2)
        change_index(tmp_path / name, lambda m: m.update({half: SHARDS[1]}))
    assert torch.equal(load(tmp_path / "qwen2")["output.weight"], load(tmp_path / "qwen2")["tok_embeddings.weight"])
    with pytest.raises(CheckpointError, match=f"{half} is missing"):
        load(tmp_path / "llama2")


def test_json_files_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["llama3.2"], random_weights(read(CONFIGS["llama3.2"])), 2)
    make_family("llama3", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    before = load(tmp_path), load_tokenizer(tmp_path).encode_special("a<|eot_id|>"), find_template(tmp_path)
    files = [*tmp_path.glob("*.json"), tmp_path / "chat_template.jinja"]
    assert len(files) == 6
    for file in files:
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert open_checkpoint(tmp_path).stop_ids == {5}
    after = load(tmp_path), load_tokenizer(tmp_path).encode_special("a<|eot_id|>"), find_template(tmp_path)
    assert all(torch.equal(before[0][name], values) for name, values in after[0].items()) and after[1:] == before[1:]


def test_a_manifest_covers_every_file_that_is_read(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["llama2"], random_weights(read(CONFIGS["llama2"])), 2)
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    checkpoint = HuggingFaceCheckpoint(tmp_path)
    names = [file.name for file in checkpoint.files]
    assert names == ["config.json", "generation_config.json", "model.safetensors.index.json", *SHARDS]
    assert all(checkpoint.owns(name) for name in names) and not checkpoint.owns("adapter_model.safetensors")
    digests = {str(file): sha256_of(file) for file in checkpoint.files}
    Manifest("SHA256SUMS", digests).check_complete(checkpoint)
    with pytest.raises(CheckpointError, match="no such file"):
        Manifest("SHA256SUMS", digests | {str(tmp_path / "model-9.safetensors"): "0"}).check_complete(checkpoint)


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def change_index(directory: Path, changes: Callable[[dict[str, Any]], object]) -> None:
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    changes(index["weight_map"])
    file.write_text(json.dumps(index))


def _with_length(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def _named(name: int, begin: int) -> bytes:
    return b'"%d": {"dtype": "U8", "shape": [1], "data_offsets": [%d, %d]}' % (name, begin, begin + 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not safetensors"),
        (b"\xff" * 16, "more than 16777216"),
        (_with_length(bytes(2**24 + 1)), "more than 16777216"),
        (b"\x00\x01" + bytes(6), "not safetensors"),
        (_with_length(b"[]"), "not safetensors"),
        (_with_length(b"\xff\xfe"), "not safetensors"),
        (
            _with_length(b"{" + b", ".join(_named(i // 2, i) for i in range(20_000)) + b"}") + bytes(20_000),
            "invalid offset",
        ),
    ],
    ids=["empty", "magic", "large", "short", "list", "text", "twice"],
)
def test_a_file_that_is_no_safetensors_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    write(tmp_path, CONFIGS["llama2"], random_weights(read(CONFIGS["llama2"])))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"model.safetensors: .*{message}"):
        load(tmp_path)


INDEX_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a parent folder": (lambda m: m.update({"lm_head.weight": "../x.safetensors"}), "outside the index's folder"),
    "an absolute path": (lambda m: m.update({"lm_head.weight": "/x.safetensors"}), "outside the index's folder"),
    "a missing file": (lambda m: m.update({"lm_head.weight": "x.safetensors"}), "'x.safetensors'.*is missing"),
    "another file": (lambda m: m.update({"lm_head.weight": "config.json"}), "not the name of a safetensors file"),
    "no name": (lambda m: m.update({"lm_head.weight": 3}), "not the name of a safetensors file"),
    "the wrong file": (
        lambda m: m.update({n: SHARDS[1 - SHARDS.index(f)] for n, f in m.items()}),
        r"'.*' is in model-0000\d.*, not in model-0000\d.* and \d+ more",
    ),
    "a weight that no file has": (lambda m: m.update({"x": SHARDS[0]}), f"'x' is not in {SHARDS[0]}"),
    "a weight left out": (lambda m: m.pop("lm_head.weight"), "'lm_head.weight' in .* is not in the index"),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_an_index_that_does_not_fit_its_files_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    write(tmp_path, CONFIGS["llama2"], random_weights(read(CONFIGS["llama2"])), 2)
    changes, message = INDEX_FAULTS[fault]
    change_index(tmp_path, changes)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(tmp_path)
    assert str(tmp_path) in raised.value.message


def test_missing_unexpected_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    config = read(CONFIGS["llama2"])
    stored = in_hugging_faces_layout(random_weights(config), config)
    write(tmp_path, CONFIGS["llama2"], random_weights(config))
    del stored["model.norm.weight"]
    stored["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    stored["lm_head.weight"] = torch.zeros(640, 64, dtype=torch.int8)
    stored["model.layers.3.input_layernorm.weight"] = torch.zeros(64)
    hugging_face.write_files(tmp_path, stored, 1)
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)
    for fault in (
        "model.norm.weight is missing",
        "model.layers.0.mlp.up_proj.weight has shape [3, 3], expected [96, 64]",
        "lm_head.weight has dtype I8, expected one of BF16, F16, F32",
        "'model.layers.3.input_layernorm.weight' in model.safetensors is unexpected",
    ):
        assert fault in raised.value.message


def test_a_folder_without_its_files_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama2"]))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"no model\.safetensors in it"):
        checkpoint.num_shards()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="save_pretrained of transformers writes safetensors"):
        checkpoint.num_shards()
    (tmp_path / SHARDS[0]).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"index.json: no such file"):
        checkpoint.num_shards()
    (tmp_path / "consolidated.00.pth").write_bytes(b"")
    assert not HuggingFaceCheckpoint.recognizes(tmp_path), "Meta's shards count, where a folder has both"


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc to measure the peak")
@pytest.mark.parametrize(
    ("num_files", "world_size"),
    [pytest.param(1, 1, marks=pytest.mark.full), pytest.param(1, 3, marks=pytest.mark.full), (3, 2)],
)
def test_peak_memory_of_a_rank_is_its_share_of_the_weights(tmp_path: Path, num_files: int, world_size: int) -> None:
    given = CONFIGS["qwen3"] | {"hidden_size": 1024, "head_dim": 128, "intermediate_size": 2816}
    given |= {"num_hidden_layers": 8}
    write(tmp_path, given, random_weights(read(given), dtype=torch.bfloat16), num_files)
    assert 0.9 < peak_ratio(tmp_path, world_size - 1, world_size) < 1.25
