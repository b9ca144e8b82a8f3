"""`llama-ray estimate`: agreement with measured memory, and its output."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import llama_ray, on_one_line
from tests.support import hugging_face
from tests.support.checkpoints import WIDE, random_weights, split, write
from tests.support.coded_models import Coded, quantization_config, write_pair
from tests.support.hugging_face import CONFIGS
from tests.support.programs import seen_by

TOLERANCE = 0.05
# Pages of libraries that a rank touches when it first computes. The estimate leaves them out; processors differ in them.
CODE_BYTES = 4 * 2**20


def test_the_estimate_of_each_rank_agrees_with_its_measured_memory() -> None:
    words = ("demo", "2", "float32", "auto", "256")
    rows = seen_by("tests.programs.estimate", *words, PYTHONDONTWRITEBYTECODE="")["ranks"]
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        assert abs(row["estimated"] - row["measured"]) <= TOLERANCE * row["measured"] + CODE_BYTES, row


def test_ranks_and_contexts_are_shown_as_a_table_and_as_json() -> None:
    words = ("estimate", "demo", "--ranks", "2", "--max-seq-len", "1Ki", "--batch", "4", "--dtype", "float32")
    done = llama_ray(*words)
    assert done.returncode == 0, done.stderr
    texts = ("weights", "cache", "working", "total", "max_seq_len 1,024", "max_batch_size 4", "Free on this machine")
    assert [text for text in texts if text not in done.stdout] == []
    found = json.loads(llama_ray(*words, "--json").stdout)
    ranks = found["ranks"]
    assert len(ranks) == 2 and (found["max_seq_len"], found["max_batch_size"]) == (1024, 4)
    assert all(one["total"] == one["weights"] + one["cache"] + one["working"] for one in ranks)
    here = [
        one for one in found["by_context_and_concurrency"] if (one["max_seq_len"], one["max_batch_size"]) == (1024, 4)
    ]
    assert [one["rank_total"] for one in here] == [max(one["total"] for one in ranks)]


def test_weights_follow_the_number_of_ranks_the_dtype_and_the_format() -> None:
    def weights(*words: str) -> float:
        found = json.loads(llama_ray("estimate", "demo", "--max-seq-len", "512", *words, "--json").stdout)
        return float(found["ranks"][0]["weights"])

    whole = weights("--ranks", "1", "--dtype", "float32")
    assert weights("--ranks", "2", "--dtype", "float32") == pytest.approx(whole / 2, rel=0.02)
    assert weights("--ranks", "1", "--dtype", "bfloat16") == pytest.approx(whole / 2, rel=0.02)
    assert weights("--ranks", "1", "--dtype", "bfloat16", "--quantization", "int4") < 0.25 * whole


def test_a_configuration_files_arguments_count_where_no_option_is_given(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    args = "{ckpt_dir: demo, model_parallel_size: 2, max_seq_len: 256, max_batch_size: 5}"
    config.write_text(f"applications: [{{import_path: 'deployments.app:build_app', args: {args}}}]")
    env = {"LLAMA_MAX_BATCH_SIZE": "3", "LLAMA_KV_CACHE_BYTES": "1MB"}
    found = json.loads(llama_ray("estimate", str(config), "--json", "--max-seq-len", "512", env=env).stdout)
    assert (found["max_seq_len"], found["max_batch_size"], len(found["ranks"])) == (512, 5, 2)
    assert max(one["cache"] for one in found["ranks"]) <= 10**6
    config.write_text("applications: [{import_path: other:app}]")
    assert "its first application is not deployments.app:build_app" in llama_ray("estimate", str(config)).stderr


@pytest.mark.parametrize("name", ["llama3.2", "qwen3"])
def test_config_json_alone_gives_the_estimate_of_the_whole_folder(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name] | {"torch_dtype": "float32"}
    hugging_face.write(tmp_path, config, hugging_face.random_weights(hugging_face.read(config)), 2)
    whole = llama_ray("estimate", str(tmp_path), "--ranks", "2", "--json")
    assert whole.returncode == 0, whole.stderr
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    assert llama_ray("estimate", str(tmp_path), "--ranks", "2", "--json").stdout == whole.stdout


@pytest.mark.parametrize(
    "coded",
    [
        Coded("gptq", block=(1, 64)),
        Coded("awq", symmetric=False, block=(1, 32)),
        Coded("gptq", scattered=True, block=(1, 32)),
        Coded("fp8", 8, (128, 128)),
        Coded("pack-quantized", 8, block=(1, 32)),
    ],
)
def test_config_json_tells_how_codes_are_held(tmp_path: Path, coded: Coded) -> None:
    config = CONFIGS["llama2"] | {"torch_dtype": "float32"}
    dense = hugging_face.write(tmp_path / "dense", config, hugging_face.random_weights(hugging_face.read(config)))
    folder, _ = write_pair(dense, {"": coded}, quantization_config(coded), tmp_path)
    whole = json.loads(llama_ray("estimate", str(folder), "--ranks", "2", "--json").stdout)
    (folder / "model.safetensors").unlink()
    alone = json.loads(llama_ray("estimate", str(folder), "--ranks", "2", "--json").stdout)
    assert (alone["format"], alone["ranks"]) == (whole["format"], whole["ranks"])


def test_an_unsupported_family_is_named_before_anything_else_fails(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "cohere2", "num_hidden_layers": 0}')
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "model.safetensors").write_text("")
    done = llama_ray("estimate", str(tmp_path), "--ranks", "999")
    assert done.returncode == 1 and "model_type 'cohere2' is not supported, only exaone4" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("demo", "--max-seq-len", "8x"), "--max-seq-len"),
        (("demo", "--ranks", "99"), "more than the 8 query heads"),
        (("tests/data/golden",), "estimate: "),
        (("demo", "--kv-cache-bytes", "0"), "must be at least 1"),
    ],
)
def test_a_wrong_argument_is_named(words: tuple[str, ...], expected: str) -> None:
    done = llama_ray("estimate", *words)
    assert done.returncode in (1, 2) and expected in on_one_line(done.stderr) and "Traceback" not in done.stderr


def test_no_weight_is_read(tmp_path: Path) -> None:
    """Zeros in place of all weights change nothing."""
    folder = write(tmp_path / "ckpt", split(random_weights(WIDE), 1))
    before = llama_ray("estimate", str(folder), "--json").stdout
    path = folder / "consolidated.00.pth"
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4096] = bytes(4096)
    path.write_bytes(data)
    assert before and llama_ray("estimate", str(folder), "--json").stdout == before


def test_the_cache_that_a_gpu_holds_grows_with_fewer_weight_bytes() -> None:
    def on_gpu(quantization: str) -> dict[str, Any]:
        words = ("estimate", "demo", "--ranks", "2", "--gpu", "l4", "--quantization", quantization, "--json")
        found: dict[str, Any] = json.loads(llama_ray(*words).stdout)["gpu"]
        return found

    plain, packed = on_gpu("none"), on_gpu("int4")
    assert (plain["name"], plain["ranks"]) == ("l4", 2)
    assert plain["cache_tokens"] < packed["cache_tokens"] and plain["cache_bytes"] < 0.9 * 23_034 * 2**20
    shown = llama_ray("estimate", "demo", "--ranks", "2", "--gpu", "l4", "--quantization", "none").stdout
    assert "Each rank on l4: a cache of" in shown and f"{plain['cache_tokens']:,} tokens" in shown
