"""Converts a checkpoint of any format that can be read: weights, configuration, tokenizer, SHA256SUMS, and a comparison."""

import json
import os
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import torch

from llama_core.checkpoint.digest import sha256_of_each
from llama_core.checkpoint.hf_quantization import FORMATS, quantization_config
from llama_core.checkpoint.hugging_face import HuggingFaceCheckpoint
from llama_core.checkpoint.json_fields import read_object
from llama_core.checkpoint.loader import Progress
from llama_core.checkpoint.manifest import FILE_NAME, Manifest
from llama_core.checkpoint.registry import checkpoint_path, open_checkpoint
from llama_core.checkpoint.source import WeightReader
from llama_core.config import DType
from llama_core.convert import hugging_face, meta, safetensors_writer
from llama_core.convert.quantized import BITS, QuantizedReader, check_groups
from llama_core.errors import CheckpointError, ConfigError
from llama_core.model_config import ModelConfig
from llama_core.text.registry import find_tokenizer, load_tokenizer, tokenizer_files
from llama_core.text.tokenizer import Tokenizer

Format = Literal["hf", "meta"]
Quantize = Literal["int4", "int8"]
LARGEST_DIFFERENCE = 1e-3  # of a logit; both sides compute the same weights in the same dtype, in the same order
# Files beside the weights that belong to the tokenizer and the chat, as far as they exist.
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model")
_OF_TOKENIZER: Final = (*_TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_COPIED: Final = (*_OF_TOKENIZER, "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Converted:
    """files: of the target. difference: the largest difference of a logit; None if it was not compared."""

    files: tuple[Path, ...]
    difference: float | None


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    tokenizer_path: Path | None
    tokenizer: Tokenizer | None
    model: ModelConfig
    reader: WeightReader
    stop_ids: frozenset[int]

    @property
    def num_ids(self) -> int:
        return self.tokenizer.n_words if self.tokenizer is not None else self.model.vocab_size


def convert(
    source: Path,
    target: Path,
    target_format: Format,
    num_shards: int = 1,
    *,
    tokenizer_path: Path | None = None,
    dtype: DType = "auto",
    quantize: Quantize | None = None,
    verify: bool = True,
    on_progress: Progress = lambda done, total: None,
) -> Converted:
    """Write the checkpoint at `source` to the new folder `target`, which appears when it is complete and compared.

    dtype: of the weights; "auto" is the checkpoint's own, to which quantized weights are expanded. quantize: the format of
    linear layers but the output layer. tokenizer_path: by default what lies at `source`. Checks SHA256SUMS in `source`, if it
    exists, and writes one. Raises ConfigError for a model that the format cannot describe, CheckpointError for a damaged source
    or an existing target.
    """
    if target_format not in get_args(Format):
        raise ConfigError(f"format must be one of {', '.join(get_args(Format))}", param="format")
    if quantize is not None:
        _check_quantize(quantize, target_format)
    if target.exists():
        raise CheckpointError(f"{target}: exists already", param="target")
    opened = _open(source, tokenizer_path)
    weight_format = None
    if quantize is not None:
        check_groups(opened.model)
        weight_format = FORMATS[BITS[quantize]]
    to = opened.reader.dtype if dtype == "auto" else getattr(torch, dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        folder = Path(name) / "checkpoint"
        folder.mkdir()
        if target_format == "hf":
            _write_hugging_face(opened, folder, to, quantize, num_shards, on_progress)
        else:
            _write_meta(opened, folder, to, num_shards, on_progress)
        _copy_tokenizer(opened, folder)
        _check_readable(opened, folder)
        _write_manifest(folder)
        difference = _compare(opened, folder, to, weight_format) if verify else None
        os.rename(folder, target)
    return Converted(tuple(sorted(target.iterdir())), difference)


def _open(source: Path, tokenizer_path: Path | None) -> _Source:
    source = checkpoint_path(source)
    checkpoint = open_checkpoint(source)
    if (manifest := Manifest.find(source)) is not None:
        manifest.check_complete(checkpoint)
        manifest.verify(checkpoint.files, os.cpu_count() or 1)
    checkpoint.num_shards()
    path = tokenizer_path or _tokenizer_of(source)
    if path is None and not isinstance(checkpoint, HuggingFaceCheckpoint):
        raise CheckpointError(f"{source}: no tokenizer in it: name one with --tokenizer", param="tokenizer")
    tokenizer = load_tokenizer(path) if path is not None else None
    model = checkpoint.model_config(tokenizer.n_words if tokenizer is not None else 1)
    reader = checkpoint.open_weights(model)
    reader.verify_checksums(0, 1)
    stop_ids = checkpoint.stop_ids | (tokenizer.stop_ids if tokenizer is not None else frozenset())
    return _Source(source, path, tokenizer, model, reader, stop_ids)


def _tokenizer_of(source: Path) -> Path | None:
    if not source.is_dir():
        return source
    found = find_tokenizer(source)
    return found if found.is_file() else None


def _check_quantize(quantize: str, target_format: str) -> None:
    if quantize not in BITS:
        raise ConfigError(f"quantize must be one of {', '.join(BITS)}", param="quantize")
    if target_format != "hf":
        raise ConfigError(
            "Meta's format has no scales of groups, so it cannot hold quantized weights: use the format hf, or the argument "
            "quantization, which quantizes at load",
            param="quantize",
        )


def _write_hugging_face(
    source: _Source,
    folder: Path,
    dtype: torch.dtype,
    quantize: Quantize | None,
    num_files: int,
    on_progress: Progress,
) -> None:
    bos_id = source.tokenizer.bos_id if source.tokenizer is not None else None
    config = _own_config(source.path, dtype) or hugging_face.config_of(source.model, dtype, source.stop_ids, bos_id)
    reader = source.reader
    if quantize is not None:
        config |= {"quantization_config": quantization_config(BITS[quantize])}
        reader = QuantizedReader(reader, FORMATS[BITS[quantize]])
    is_quantized = quantize is not None
    safetensors_writer.write_weights(reader, source.model, dtype, folder, num_files, on_progress, is_quantized)
    _write_json(folder / "config.json", config)
    if not (source.path / "generation_config.json").exists():
        _write_json(folder / "generation_config.json", _generation_config(source.stop_ids, bos_id))


def _own_config(source: Path, dtype: torch.dtype) -> dict[str, Any] | None:
    """The source's own config.json, which may say more than we read; without its quantization."""
    if not HuggingFaceCheckpoint.recognizes(source):
        return None
    config = read_object(source / "config.json")
    config.pop("quantization_config", None)
    named = "torch_dtype" if "torch_dtype" in config else "dtype"
    return config | {named: str(dtype).removeprefix("torch.")}


def _generation_config(stop_ids: Collection[int], bos_id: int | None) -> dict[str, Any]:
    return {"bos_token_id": bos_id, "eos_token_id": sorted(stop_ids)}


def _write_meta(source: _Source, folder: Path, dtype: torch.dtype, num_shards: int, on_progress: Progress) -> None:
    params = meta.params_of(source.model, source.num_ids)
    meta.write_weights(source.reader, source.model, dtype, folder, num_shards, on_progress)
    _write_json(folder / "params.json", params)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _copy_tokenizer(source: _Source, folder: Path) -> None:
    """Copy the files beside the weights, and of the tokenizers the one that was loaded: its ids are the model's."""
    path = source.tokenizer_path
    for name in _COPIED if source.path.is_dir() else ():
        other = name in _TOKENIZERS and path is not None and path != source.path / name
        if (source.path / name).is_file() and not other:
            shutil.copyfile(source.path / name, folder / name)
    if path is not None and path != source.path and path.name in _COPIED:
        for each in tokenizer_files(path):
            if each.name in _OF_TOKENIZER:
                shutil.copyfile(each, folder / each.name)


def _check_readable(source: _Source, folder: Path) -> None:
    """Raises CheckpointError, ConfigError or TokenizerError if a server could not load the target."""
    found = find_tokenizer(folder)
    open_checkpoint(folder).model_config(load_tokenizer(found).n_words if found.is_file() else source.num_ids)


def _write_manifest(folder: Path) -> None:
    files = sorted(folder.iterdir())
    digests = sha256_of_each(files, os.cpu_count() or 1)
    lines = [f"{digest}  {file.name}\n" for file, digest in zip(files, digests, strict=True)]
    (folder / FILE_NAME).write_text("".join(lines))


def _compare(source: _Source, folder: Path, dtype: torch.dtype, weight_format: str | None) -> float:
    from llama_core.convert.verification import largest_difference

    # The CPU backends compute in bfloat16 where the weights are float16; both sides do.
    name = cast(DType, str(dtype).removeprefix("torch."))
    name = "float32" if name == "float16" else name
    difference = largest_difference(source.path, folder, source.num_ids, name, weight_format)
    if not difference <= LARGEST_DIFFERENCE:
        raise CheckpointError(
            f"{source.path}: the converted model's logits differ by up to {difference:.3g}: the target was removed"
        )
    return difference
