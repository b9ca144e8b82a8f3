"""Reads JSON objects in a checkpoint's files. Errors name the file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_core.errors import CheckpointError, ConfigError, LlamaError
from llama_core.files.text_files import fault_of

_MAX_BYTES = 100_000_000  # a file of weights that was renamed has gigabytes


def refuse_faults(place: str, faults: Sequence[str]) -> None:
    """Raises CheckpointError that names the first five, if there are any."""
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(f"{place}: {'; '.join(faults[:5])}{more}")


def read_object(path: Path, max_bytes: int = _MAX_BYTES, refusal: type[LlamaError] = ConfigError) -> dict[str, Any]:
    """The JSON object that the file holds. Raises `refusal` that names the file."""
    try:
        if path.stat().st_size > max_bytes:
            raise refusal(f"{path}: has more than {max_bytes} bytes")
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise refusal(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        what = f"not readable as JSON: {str(error)[:200]}"
        raise refusal(f"{path}: {fault_of(path, what)}") from None
    if not isinstance(values, dict):
        raise refusal(f"{path}: must hold a JSON object")
    return values
