"""Finds the checkpoint format of a path. Each format is one line in the table here."""

from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Final

from llama_core.errors import CheckpointError
from llama_core.files.gguf.model import find_models, refuse_later_part
from llama_core.files.source import CheckpointSource

# Name -> class, imported on first use. The first that recognizes the path, by the names of files, opens it; the last recognizes
# every path, so that its error says what is wrong with a path of no known format.
FORMATS: Final[Mapping[str, str]] = {
    "gguf": "llama_core.checkpoint.gguf:GgufCheckpoint",
    "hugging_face": "llama_core.checkpoint.hugging_face:HuggingFaceCheckpoint",
    "meta": "llama_core.checkpoint.meta:MetaCheckpoint",
}

_OTHER_FORMATS: Final = ("config.json", "params.json", "*.pth", "*.safetensors")
_SHOWN_MODELS: Final = 8


def open_checkpoint(path: str | Path) -> CheckpointSource:
    """The checkpoint at `path`, a directory or a file. Reads only names of files; see `CheckpointSource` for errors."""
    path = checkpoint_path(path)
    formats = map(resolve_name, FORMATS.values())
    source: CheckpointSource = next(each for each in formats if each.recognizes(path))(path)
    return source


def checkpoint_path(path: str | Path) -> Path:
    """`path`; for a folder with one GGUF model and no model in another format, as downloads make it, that model's file.

    Raises CheckpointError for such a folder with several GGUF models, and for a later part of a split one.
    """
    path = Path(path)
    refuse_later_part(path, "ckpt_dir")
    if not path.is_dir() or any(next(path.glob(each), None) for each in _OTHER_FORMATS):
        return path
    models = find_models(path)
    if len(models) > 1:
        names = ", ".join(each.name for each in models[:_SHOWN_MODELS])
        raise CheckpointError(
            f"{path}: has {len(models)} GGUF models: set ckpt_dir to one of {names}", param="ckpt_dir"
        )
    return models[0] if models else path


def format_name(source: CheckpointSource) -> str:
    """The name of the source's format in FORMATS."""
    return next(name for name, target in FORMATS.items() if isinstance(source, resolve_name(target)))
