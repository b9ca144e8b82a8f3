"""The pieces that a parser makes of an answer's text, in their order."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, without its marks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the tool `name` begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the last call's arguments, as JSON text."""

    text: str


Piece = Content | Reasoning | CallStart | Arguments


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces, with neighbours of one kind joined: the same for every division of a stream."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, CallStart) or isinstance(last, CallStart | None) or type(last) is not type(piece):
            result.append(piece)
        else:
            result[-1] = type(piece)(last.text + piece.text)
    return result
