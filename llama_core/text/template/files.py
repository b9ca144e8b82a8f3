"""Finds a model's chat template: beside its weights, in its GGUF file, or as the operator gives it."""

from pathlib import Path
from typing import Any, Final, NamedTuple

from llama_core.errors import CheckpointError, ConfigError, TokenizerError
from llama_core.files.gguf.file import GgufFile, is_gguf
from llama_core.text.tokenizers.files import MAP_FILE, read_bounded, read_json_object

MAX_TEMPLATE_BYTES: Final = 2**20
_MAX_CONFIG_BYTES: Final = 64 * 2**20  # some tokenizer_config.json list every added token
_PLAIN: Final = "chat_template.jinja"
_JSON_FILES: Final = ("tokenizer_config.json", "chat_template.json")
TEMPLATE_FILES: Final = (_PLAIN, *_JSON_FILES, MAP_FILE)


class TemplateFile(NamedTuple):
    """A template. origin: its file, for errors."""

    source: str
    origin: str


def given_template(value: str) -> TemplateFile:
    """The argument `chat_template`: a path, or a template's text, which has a brace. Raises ConfigError for a path without a
    readable file."""
    if "{" in value or "\n" in value:
        return TemplateFile(value, "chat_template")
    try:
        path = Path(value).expanduser()
        return TemplateFile(_text(path), str(path))
    except (TokenizerError, RuntimeError, ValueError) as error:  # no home of that user; a NUL in the path
        problem = error.message if isinstance(error, TokenizerError) else f"{value[:200]!r} is no path ({error})"
        raise ConfigError(
            f"chat_template: {problem}; give the path of a template, or its text", param="chat_template"
        ) from None


def find_template(checkpoint: Path) -> TemplateFile | None:
    """The template that the model at `checkpoint`, a folder or a GGUF file, brings with it; None if it has none.

    Raises TokenizerError that names a file that cannot be read.
    """
    if checkpoint.is_file():
        return _gguf_template(checkpoint) if is_gguf(checkpoint) else None
    plain = checkpoint / _PLAIN
    if plain.is_file():
        return TemplateFile(_text(plain), str(plain))
    for name in _JSON_FILES:
        path = checkpoint / name
        if path.is_file():
            source = _chosen(read_json_object(path, _MAX_CONFIG_BYTES).get("chat_template"), path)
            if source is not None:
                return TemplateFile(source, str(path))
    files = sorted(checkpoint.glob("*.gguf")) if checkpoint.is_dir() else []
    return _gguf_template(files[0]) if files else None


def template_files(checkpoint: str | Path) -> list[Path]:
    """The files in a folder that have the template, and its variables; none for a GGUF file, which has its own."""
    return [path for name in TEMPLATE_FILES if (path := Path(checkpoint) / name).is_file()]


def _chosen(value: Any, path: Path) -> str | None:
    """A template, or of several named ones the one called "default"."""
    if value is None or isinstance(value, str):
        return value
    named = value if isinstance(value, dict) else {}
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        pairs = [(each.get("name"), each.get("template")) for each in value]
        named = dict(pairs) if all(isinstance(name, str) for name, _ in pairs) else {}
    if not named or not all(isinstance(key, str) and isinstance(text, str) for key, text in named.items()):
        raise TokenizerError(f"{path}: chat_template must be a template, or a list of named templates")
    source = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
    if source is None:
        raise TokenizerError(
            f"{path}: chat_template has several templates and none called 'default': set the argument chat_template to one"
        )
    return str(source)


def _gguf_template(path: Path) -> TemplateFile | None:
    try:
        metadata = GgufFile(path).metadata
    except CheckpointError as error:
        raise TokenizerError(error.message) from None
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerError(f"{path}: tokenizer.chat_template must be text")
    return TemplateFile(source, str(path))


def _text(path: Path) -> str:
    try:
        return read_bounded(path, MAX_TEMPLATE_BYTES, "chat template").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise TokenizerError(f"{path}: a chat template must be UTF-8 text") from None
