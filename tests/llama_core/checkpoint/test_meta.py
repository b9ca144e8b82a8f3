"""Any number of shards loads on any number of ranks, and every kind of invalid checkpoint is refused."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core.backends.parallel import alone
from llama_core.backends.runner import ModelRunner
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.config import EngineConfig
from llama_core.errors import CheckpointError, ConfigError, NonFiniteLogits
from llama_core.files.meta_params import config_from_params, read_params
from llama_core.model.weights import weight_specs
from tests.support import checkpoints
from tests.support.checkpoints import WIDE, load, peak_ratio, random_weights, split, write


@pytest.mark.parametrize("embedding_dim", [1, 0], ids=["Llama 2's cuts", "Llama 3's embedding"])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_weights_are_joined_and_converted_and_progress_counts_every_byte_once(
    tmp_path: Path, num_shards: int, embedding_dim: int
) -> None:
    """test_files_onto_ranks.py has the parts of ranks."""
    weights = random_weights(WIDE, dtype=torch.bfloat16)
    write(tmp_path, split(weights, num_shards, embedding_dim=embedding_dim))
    seen: list[tuple[int, int]] = []
    got = load(tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    assert got.keys() == weights.keys() and all(torch.equal(got[name], weights[name].float()) for name in weights)
    total = sum(weight.nbytes for weight in got.values())
    assert [total_bytes for _, total_bytes in seen] == [total] * len(seen)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and seen[-1][0] == total


@pytest.mark.parametrize("embedding_dim", [1, 0])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_llama_3_2_may_leave_its_output_layer_out(tmp_path: Path, num_shards: int, embedding_dim: int) -> None:
    params = WIDE | {"dim": 2048, "n_layers": 1, "use_scaled_rope": True, "rope_theta": 500_000.0, "multiple_of": 32}
    params |= {"ffn_dim_multiplier": 0.02, "n_heads": 32, "n_kv_heads": 8}
    weights = random_weights(params)
    write(tmp_path, split(weights, num_shards, embedding_dim=embedding_dim), params)
    assert not open_checkpoint(tmp_path).model_config(640).tied_embeddings, "its own output layer counts"
    del weights["output.weight"]
    write(tmp_path, split(weights, num_shards, embedding_dim=embedding_dim), params)
    config = open_checkpoint(tmp_path).model_config(640)
    assert config.tied_embeddings
    assert torch.equal(load(tmp_path)["output.weight"], weights["tok_embeddings.weight"])


# Faults 28 to 33 of docs/faults.md


def test_what_is_no_checkpoint_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no such directory; .* of a hub, ORG/NAME"):
        load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: a file in no known format"):
        load(tmp_path / "tokenizer.model")


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["TRAP"],)


@pytest.mark.parametrize("how", ["in an archive", "as a bare pickle", "in the format before archives"])
def test_a_malicious_pickle_is_refused_and_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    write(tmp_path, split(random_weights(WIDE), 1))
    path = tmp_path / "consolidated.00.pth"
    if how == "in an archive":
        torch.save({"norm.weight": Malicious()}, path)
    elif how == "in the format before archives":
        torch.save({"norm.weight": Malicious()}, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth"):
        load(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_the_first_five_missing_unexpected_or_misshapen_weights_are_named(tmp_path: Path) -> None:
    (shard,) = split(random_weights(WIDE), 1)
    del shard["layers.0.attention.wq.weight"], shard["layers.1.ffn_norm.weight"]
    shard["layers.9.attention.wq.weight"] = torch.zeros(3)
    shard["norm.weight"] = torch.zeros(7)
    write(tmp_path, [shard])
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    text = str(caught.value)
    assert "layers.0.attention.wq.weight is missing" in text and "layers.1.ffn_norm.weight is missing" in text
    assert "layers.9.attention.wq.weight is unexpected" in text
    assert "norm.weight has shape [7] in consolidated.00.pth, expected [64]" in text

    (shard,) = split(random_weights(WIDE), 1)
    write(tmp_path, [{name: weight for name, weight in shard.items() if "attention.w" not in name}])
    with pytest.raises(CheckpointError, match="and 3 more") as caught:
        load(tmp_path)
    assert str(caught.value).count(" is missing from consolidated.00.pth") == 5


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no shard", "no shard"),
        ("missing", r"consolidated\.00\.pth: this shard is missing"),
        ("last missing", "shape|part of"),
        ("duplicated", r"01\.pth: holds the same weights as consolidated\.00\.pth"),
        ("swapped", r"00\.pth: holds shard consolidated\.01"),
        ("mixed", "different checkpoints"),
        ("truncated", r"consolidated\.01\.pth"),
    ],
)
def test_invalid_shards_are_refused_by_name_before_memory_is_allocated(
    tmp_path: Path, fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocated(*args: Any, **options: Any) -> None:
        raise AssertionError("memory for a weight or a cache was allocated")

    shards = split(random_weights(WIDE), 2)
    if fault in ("duplicated", "mixed"):
        shards[1] = shards[0] if fault == "duplicated" else split(random_weights(WIDE, seed=2), 2)[1]
    write(tmp_path, shards)
    first, second = tmp_path / "consolidated.00.pth", tmp_path / "consolidated.01.pth"
    if fault == "swapped":
        first.rename(tmp_path / "aside"), second.rename(first), (tmp_path / "aside").rename(second)
    elif fault == "truncated":
        second.write_bytes(second.read_bytes()[:-100])
    for path in {"no shard": [first, second], "missing": [first], "last missing": [second]}.get(fault, []):
        path.unlink()
    monkeypatch.setattr("llama_core.backends.rank_loading.planned_weights", allocated)
    monkeypatch.setattr("llama_core.backends.rank_loading.SlotTable", allocated)
    with pytest.raises(CheckpointError, match=message):
        ModelRunner.load(engine_config(tmp_path), alone("cpu"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_stops_the_start(tmp_path: Path, value: float) -> None:
    weights = random_weights(WIDE)
    weights["layers.1.feed_forward.w2.weight"][3, 5] = value
    write(tmp_path, split(weights, 2))
    with pytest.raises(CheckpointError, match=r"consolidated\.0\d\.pth: layers\.1\.feed_forward\.w2\.weight"):
        load(tmp_path)


def engine_config(directory: Path, **changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 4, "device": "cpu", "dtype": "float32"}
    return EngineConfig(str(directory), 640, **fields | changes)


def test_a_model_that_overflows_fails_the_warm_up(tmp_path: Path) -> None:
    weights = random_weights(WIDE)
    weights["layers.0.attention_norm.weight"][:] = 3e38  # finite, but products with it overflow
    write(tmp_path, split(weights, 1))
    runner = ModelRunner.load(engine_config(tmp_path), alone("cpu"))
    runner.allocate_cache(runner.max_num_blocks())
    with pytest.raises(NonFiniteLogits, match=str(tmp_path)):
        runner.warm_up()


def test_a_tokenizer_of_another_size_is_refused_with_both_sizes(tmp_path: Path) -> None:
    write(tmp_path, split(random_weights(WIDE), 1))
    config = engine_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"\[640, 64\].*\[700, 64\]"):
        ModelRunner.load(EngineConfig(config.ckpt_dir, 700, 64, 4, device="cpu"), alone("cpu"))
    (tmp_path / "params.json").write_text(json.dumps(WIDE | {"vocab_size": 640}))
    with pytest.raises(ConfigError, match=r"640.*700"):
        read_params(tmp_path, vocab_size=700)


def test_a_cache_too_small_for_one_sequence_is_refused_with_need_and_budget(tmp_path: Path) -> None:
    write(tmp_path, split(random_weights(WIDE), 1))
    runner = ModelRunner.load(engine_config(tmp_path, kv_cache_bytes=1000), alone("cpu"))
    with pytest.raises(ConfigError, match=r"needs \d+ bytes on this rank, but there are 1000"):
        runner.max_num_blocks()


@pytest.mark.parametrize(
    "weight",
    [
        torch.eye(64).to_sparse(), torch.zeros(64, device="meta"), torch.zeros(64, dtype=torch.complex64),
        torch.ones(64, dtype=torch.int8), torch.ones(64, dtype=torch.bool), torch.ones(64).to(torch.float8_e4m3fn), 5,
    ],
    ids=["sparse", "meta", "complex", "int8", "bool", "float8", "number"],
)  # fmt: skip
def test_a_tensor_of_an_unsupported_kind_is_refused_by_name(tmp_path: Path, weight: Any) -> None:
    (shard,) = split(random_weights(WIDE), 1)
    shard["norm.weight"] = weight
    write(tmp_path, [shard])
    with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth.*norm\.weight"):
        load(tmp_path)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc to measure the peak")
@pytest.mark.parametrize(("num_shards", "world_size"), [(1, 1), pytest.param(1, 2, marks=pytest.mark.full), (2, 1)])
def test_peak_memory_of_a_rank_is_its_share_of_the_weights(tmp_path: Path, num_shards: int, world_size: int) -> None:
    params = WIDE | {"dim": 1024, "n_layers": 10, "multiple_of": 256}
    zeros = {
        name: torch.zeros(spec.shape, dtype=torch.bfloat16)
        for name, spec in weight_specs(config_from_params(params, vocab_size=640)).items()
    }
    for name, weight in zeros.items():
        weight.view(-1)[0] = 1 + len(name)  # so that no shard is a copy of another
        weight.view(-1)[-1] = 2 + len(name)
    write(tmp_path, checkpoints.split(zeros, num_shards), params)
    assert 0.9 < peak_ratio(tmp_path, world_size - 1, world_size) < 1.2
