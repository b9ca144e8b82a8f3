"""Checked fields of a JSON object in a checkpoint's files. Errors name the file and the field."""

import sys
from collections.abc import Mapping
from typing import Any

from llama_core.errors import ConfigError
from llama_core.model.config import MAX_SIZE

_SHOWN_CHARS = 80  # of an invalid value, in error messages


def shown(value: object) -> str:
    """The value for an error message, cut off where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


class Fields:
    """The fields of a JSON object; null counts as absent. Raises ConfigError that names a field at fault."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.given = {key: value for key, value in values.items() if value is not None}

    def integer(self, name: str, default: int | None = None, most: int = MAX_SIZE, *, least: int = 1) -> int:
        """A whole number, positive unless `least` is lower. Without a default the field must exist."""
        value = self.given.get(name, default)
        if value is None:
            raise self.fault(name, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"a positive integer, at most {most}" if least else "an integer of at least 0")
        return value

    def number(self, name: str) -> float | None:
        """A positive finite number, or None."""
        value = self.given.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:  # nor NaN; an int may be larger than any float
            raise self.wrong(name, "a positive finite number")
        return float(value)

    def numbers(self, name: str, most: int) -> tuple[float, ...]:
        """A list of positive finite numbers."""
        value = self.given.get(name)
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(name, f"a list of at most {most} numbers")
        each = Fields({str(i): number for i, number in enumerate(value)}, f"{self.source}: {name}")
        return tuple(each.number(str(i)) or 0.0 for i in range(len(value)))

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.given.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self.given.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def texts(self, name: str) -> list[str] | None:
        """A list of strings, or None."""
        value = self.given.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise self.wrong(name, "a list of strings")
        return value

    def inner(self, name: str) -> "Fields | None":
        """An object within the object; None if it is absent or empty."""
        value = self.given.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.source}: {name}") if value else None

    def wrong(self, name: str, expected: str) -> ConfigError:
        """The error for a value that is not what is expected."""
        return self.fault(name, f"must be {expected}, is {shown(self.given.get(name))}")

    def fault(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{self.source}: field {name!r} {what}")
