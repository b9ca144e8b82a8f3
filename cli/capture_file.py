"""The form of a capture, which may be a file that somebody has edited."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

Facts = dict[str, Any]


class _Read(BaseModel):
    model_config = ConfigDict(strict=True)


class _Choice(_Read):
    tokens: list[int]
    text: str
    finish_reason: str | None


def _is_no_flag(value: object) -> object:
    """Raises ValueError for true, which equals 1."""
    if isinstance(value, bool):
        raise ValueError
    return value


class _Capture(_Read):
    capture: Annotated[Literal[1], BeforeValidator(_is_no_flag)]
    route: str = Field(pattern=r"^/[!-~]*$")
    body: dict[str, Any]
    seed: int
    prompts: list[list[int]]
    choices: list[_Choice]
    outcome: str
    model: Facts
    versions: Facts
    settings: Facts
    cpu: Facts


def place_of_fault(capture: Mapping[str, Any]) -> str | None:
    """The first field that is missing or wrong, such as choices[0].tokens; None in a capture of this version."""
    try:
        _Capture.model_validate(capture)
    except ValidationError as error:
        place = error.errors(include_url=False, include_input=False)[0]["loc"]
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    return None


def printable(text: str) -> str:
    """The text with control characters escaped: a terminal would follow them."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
