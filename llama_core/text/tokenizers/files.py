"""The names of a tokenizer's files, and bounded reads of them."""

import json
from pathlib import Path
from typing import Any, Final

from llama_core.errors import TokenizerError

# Beside a tokenizer.json.
CONFIG_FILE: Final = "tokenizer_config.json"
MAP_FILE: Final = "special_tokens_map.json"
GENERATION_FILE: Final = "generation_config.json"
MODEL_FILE: Final = "config.json"
SIDE_FILES: Final = (CONFIG_FILE, MAP_FILE, GENERATION_FILE, MODEL_FILE)


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
