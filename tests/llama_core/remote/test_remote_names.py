"""Which texts name a remote model, and which of a repository's files are read."""

import json
from pathlib import Path

import pytest

from llama_core.errors import FetchError
from llama_core.remote.model_files import Kind, RemoteFile, chosen_files
from llama_core.remote.names import RemoteName, remote_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "scheme", "path", "revision", "part"),
    [
        ("org/name", "hf", "org/name", "", ""),
        ("meta-llama/Llama-3.1-8B", "hf", "meta-llama/Llama-3.1-8B", "", ""),
        ("org/name@v1.0", "hf", "org/name", "v1.0", ""),
        ("org/name@refs/pr/3:Q4_K_M", "hf", "org/name", "refs/pr/3", "Q4_K_M"),
        ("org/name:sub/x-Q8_0.gguf", "hf", "org/name", "", "sub/x-Q8_0.gguf"),
        ("hf://org/name", "hf", "org/name", "", ""),
        ("https://huggingface.co/org/name", "hf", "org/name", "", ""),
        ("org/name:a b+c.gguf", "hf", "org/name", "", "a b+c.gguf"),
        ("s3://bucket/a/b/", "s3", "bucket/a/b", "", ""),
        ("gs://bucket/a/m.gguf", "gs", "bucket/a/m.gguf", "", ""),
        ("https://host:8443/m.gguf", "https", "host:8443/m.gguf", "", ""),
    ],
)
def test_names_are_read(text: str, scheme: str, path: str, revision: str, part: str) -> None:
    assert remote_name(text) == RemoteName(scheme, path, revision, part)


@pytest.mark.parametrize(
    "text",
    ["demo", "/models/x", "./org/name", "../x", "~/x/y", "a/b/c", "", "org/", "a b/c", "x.gguf", "models/x.gguf"],
)
def test_other_texts_are_paths(text: str) -> None:
    assert remote_name(text) is None


def test_a_folder_here_wins_over_a_hubs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert remote_name("org/name") is None
    assert remote_name("hf://org/name") == RemoteName("hf", "org/name")


@pytest.mark.parametrize("text", ["org/name", "org/name:Q4_0", "s3://bucket/folder", "https://host/m.gguf"])
def test_a_pinned_name_is_read_back_and_cannot_mean_a_folder(text: str) -> None:
    name = remote_name(text)
    assert name is not None and not name.is_pinned
    pinned = name.pinned(COMMIT if name.scheme == "hf" else COMMIT[:16])
    assert pinned.is_pinned and "://" in str(pinned)
    assert remote_name(str(pinned)) == pinned


@pytest.mark.parametrize(
    ("text", "model_id"),
    [("org/Name-8B", "Name-8B"), ("o/N-GGUF:Q4_0", "N"), ("s3://b/f/N", "N"), ("https://h/x/N-Q8.gguf", "N-Q8")],
)
def test_the_last_part_is_the_model_id(text: str, model_id: str) -> None:
    name = remote_name(text)
    assert name is not None and name.model_id == model_id


TEXTS = ["config.json", "tokenizer.json", "tokenizer_config.json"]
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
GGUFS = ["m-Q4_0.gguf", "m-Q4_K_M.gguf", "UD/m-UD-Q4_K_M.gguf", "mmproj-m.gguf"]
SPLIT = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
INDEX = "model.safetensors.index.json"


def chosen(text: str, names: list[str], kind: Kind = "model", index: object = None) -> tuple[list[str], str]:
    name = remote_name(text)
    assert name is not None
    content = json.dumps(index if index is not None else {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode()
    model = chosen_files(name, COMMIT, kind, [RemoteFile(each, 1) for each in names], lambda file: content)
    return [file.name for file in model.files], model.name.main


@pytest.mark.parametrize(
    ("text", "names", "wanted", "main"),
    [
        # Copies in other formats, and another set of weights, stay where they are.
        (
            "o/n",
            [*TEXTS, "model.safetensors", "pytorch_model.bin", "original/consolidated.00.pth", "run.py", "m-Q4_0.gguf"],
            [*TEXTS, "model.safetensors"],
            "",
        ),
        ("o/n", [*TEXTS, INDEX, *SHARDS, "consolidated.safetensors"], [*TEXTS, INDEX, *SHARDS], ""),
        (
            "o/n",
            [*TEXTS, "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "model.safetensors"],
            ["1_Pooling/config.json", TEXTS[0], "modules.json", *TEXTS[1:], "model.safetensors"],
            "",
        ),
        ("o/n", GGUFS, ["m-Q4_K_M.gguf"], "m-Q4_K_M.gguf"),
        ("o/n:q4_0", [*TEXTS, "model.safetensors", *GGUFS], ["m-Q4_0.gguf"], "m-Q4_0.gguf"),
        ("o/n:UD-Q4_K_M", GGUFS, ["UD/m-UD-Q4_K_M.gguf"], "UD/m-UD-Q4_K_M.gguf"),
        ("o/n:Q8_0", [*GGUFS, *SPLIT], SPLIT, SPLIT[0]),
        ("o/n", [*TEXTS, "only.gguf"], ["only.gguf"], "only.gguf"),
    ],
)
def test_one_set_of_weights_is_chosen(text: str, names: list[str], wanted: list[str], main: str) -> None:
    assert chosen(text, names) == (wanted, main)


def test_tokenizers_and_adapters_bring_no_weights_of_the_model() -> None:
    names = [*TEXTS, "model.safetensors", "adapter_config.json", "adapter_model.safetensors"]
    assert chosen("o/n", names, "tokenizer") == (TEXTS, "")
    assert chosen("o/n", names, "adapter") == (["adapter_config.json", "adapter_model.safetensors"], "")


@pytest.mark.parametrize(
    ("text", "names", "words"),
    [
        ("o/n", [*TEXTS, "pytorch_model.bin"], "only .bin, which are not read"),
        ("o/n", ["README.md"], "neither model.safetensors nor a GGUF file"),
        (
            "o/n",
            ["a-Q4_0.gguf", "a-Q8_0.gguf"],
            "several GGUF files: name one of a-Q4_0.gguf, a-Q8_0.gguf",
        ),
        ("o/n:Q3_X", GGUFS, "no GGUF files for Q3_X"),
        ("o/n:Q4_0", ["a-Q4_0.gguf", "b-Q4_0.gguf"], "2 GGUF files for Q4_0"),
        ("o/n:Q8_0", SPLIT[:1], f"has no {SPLIT[1]}"),
        ("o/n", [*TEXTS, INDEX, SHARDS[0]], f"has no {SHARDS[1]}"),
    ],
)
def test_what_is_missing_is_named(text: str, names: list[str], words: str) -> None:
    with pytest.raises(FetchError) as refused:
        chosen(text, names)
    assert words in refused.value.message


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 5, "b": "../x.safetensors"}}])
def test_names_outside_of_the_folder_are_not_fetched(index: object) -> None:
    assert chosen("o/n", [*TEXTS, INDEX, "../x.safetensors"], index=index) == ([*TEXTS, INDEX], "")
