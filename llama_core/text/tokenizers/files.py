"""The names of a tokenizer's files, bounded reads of them, and the errors of the libraries that use them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from llama_core.errors import CheckpointError, InvalidRequest, LlamaError, TokenizerError

# Beside a tokenizer.json.
CONFIG_FILE: Final = "tokenizer_config.json"
MAP_FILE: Final = "special_tokens_map.json"
GENERATION_FILE: Final = "generation_config.json"
MODEL_FILE: Final = "config.json"
SIDE_FILES: Final = (CONFIG_FILE, MAP_FILE, GENERATION_FILE, MODEL_FILE)
_T = TypeVar("_T")


def read_bounded(path: Path, max_bytes: int, kind: str = "tokenizer file") -> bytes:
    """The whole file. kind: what it is, for errors. Raises TokenizerError that names it, also for one over `max_bytes`."""
    try:
        if not path.is_file():
            raise TokenizerError(f"{kind} {path} does not exist or is not a file")
        num_bytes = path.stat().st_size
        if not 0 < num_bytes <= max_bytes:
            raise TokenizerError(f"{kind} {path} must have 1 to {max_bytes} bytes, not {num_bytes}")
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{kind} {path} cannot be read: {error.strerror}") from None


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file. Raises TokenizerError that names the file."""
    try:
        content = json.loads(read_bounded(path, max_bytes).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"tokenizer file {path} is not readable as JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"tokenizer file {path} must hold a JSON object")
    return content


def encode_guarded(encode: Callable[[], _T]) -> _T:
    """`encode()`, an encoding of a text. Raises InvalidRequest for the library's errors."""
    return _guarded(encode, lambda reason: InvalidRequest(f"the tokenizer cannot encode this text: {reason}"))


def build_guarded(name: str, build: Callable[[], _T]) -> _T:
    """`build()`, for a vocabulary that the file `name` holds. Raises TokenizerError that names it for the library's errors."""
    return _guarded(build, lambda reason: TokenizerError(f"{name}: damaged, or not supported: {reason}"))


def _guarded(call: Callable[[], _T], refusal: Callable[[str], LlamaError]) -> _T:
    """A library raises Exception for an error, and a BaseException of its own for a panic."""
    try:
        return call()
    except (TokenizerError, CheckpointError):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise refusal(str(error)[:200]) from None
        raise
