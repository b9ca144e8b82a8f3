"""Closes the objects of a JSON schema that names their properties: models that may add properties add them without end.

A closed object is one as by `unevaluatedProperties: false`, which llguidance lacks. It stays open where it, or a schema that it
is composed with, says what further properties may be. Alternatives are closed one by one. A schema with a reference that is no
JSON pointer stays as it is, and so does one that takes long to read.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

MOST_READ: Final = 20_000  # schemas and names of properties; llguidance takes 2,500 properties
_KEYS_AS_SCHEMA, _CHARS_AS_NAME = 8, 32  # long ones count for more: each reference to a schema reads all of it
_CHOICES: Final = ("anyOf", "oneOf")
_OPENING: Final = {"additionalProperties", "patternProperties", "const", "enum", "$dynamicRef", "$recursiveRef"}
_ROOTS_OWN: Final = {"$defs", "definitions", "$id", "$anchor"}


def closed_objects(schema: dict[str, Any], most_read: int = MOST_READ) -> dict[str, Any]:
    """The schema with `additionalProperties` false where an object is closed."""
    closing = _Closing(schema, most_read)
    try:
        written: dict[str, Any] = closing.closed(schema)
    except (_Lost, RecursionError):
        return schema
    if not closing.opened:
        return written
    definitions = written.get("$defs") or {}
    return {**written, "$defs": {**definitions, **closing.opened}} if isinstance(definitions, dict) else schema


class _Lost(Exception):
    """The schema is invalid, refers to something unknown, or has too much to read."""


@dataclass(slots=True)
class _Facts:
    """What schemas that describe an object together say. names: of its properties, as an ordered set."""

    names: dict[str, None] = field(default_factory=dict)
    is_named: bool = False  # some of the names are those of `properties`
    is_open: bool = False


class _Closing:
    def __init__(self, root: dict[str, Any], most_read: int) -> None:
        self.opened: dict[str, Any] = {}  # copies of schemas that are composed by reference, by their names in $defs
        self._root = root
        self._names: dict[int, str] = {}  # of the copies, by identities of schemas, which references spell in many ways
        self._left = most_read

    def closed(self, schema: Any, outer: Collection[str] = ()) -> Any:
        """The schema of a value, or an alternative. outer: names of the properties that the schemas around it have."""
        if not isinstance(schema, dict):
            return schema
        self._read(_size(outer))
        beside = self._facts([schema], but=("$ref",))
        if not (outer or beside.names or beside.is_named or beside.is_open):
            return self._open(schema, but=("$ref",))  # what it refers to is closed where it stands
        whole, choices = self._facts([schema], but=_CHOICES), [key for key in _CHOICES if key in schema]
        if whole.is_open:
            return self._open(schema)
        if whole.is_named or outer:
            choices = [key for key in choices if self._facts(schema[key]).is_named]
            if not choices:
                written, names = self._open(schema), [*outer, *self._facts([schema]).names]
                properties = written.get("properties", {})
                written["properties"] = properties | {name: True for name in names if name not in properties}
                return written | {"additionalProperties": False}
        written = self._open(schema, but=choices)
        for key in choices:
            others = self._facts([schema], but=(key,))
            names = [*outer, *others.names] if others.is_named or outer else []
            written[key] = [self.closed(each, names) for each in schema[key]]
        return written

    def _open(self, schema: Any, but: Collection[str] = ()) -> Any:
        """The schema, whose own object is closed elsewhere or open; those of its values are closed. but: keywords to keep."""
        if not isinstance(schema, dict):
            return schema
        written = dict(schema)
        for key, value in schema.items():
            if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
                written[key] = {name: self.closed(each) for name, each in value.items()}
            elif key in ("items", "prefixItems", "additionalItems", "additionalProperties"):
                written[key] = [self.closed(each) for each in value] if isinstance(value, list) else self.closed(value)
            elif key in ("allOf", *_CHOICES) and key not in but:
                written[key] = [self._open(each) for each in value]
            elif key == "$ref" and key not in but:
                found = self._found(value)
                if (name := self._names.get(id(found))) is None:
                    name = self._names[id(found)] = f"composed-{len(self._names)}"
                    self.opened[name] = self._open({key: each for key, each in found.items() if key not in _ROOTS_OWN})
                written[key] = f"#/$defs/{name}"
        return written

    def _found(self, reference: str) -> dict[str, Any]:
        """What the reference, a JSON pointer, refers to. Raises _Lost."""
        self._read(len(reference) // _CHARS_AS_NAME)
        found: Any = self._root
        start, *parts = unquote(reference).split("/")
        try:
            for part in parts:
                found = found[int(part) if isinstance(found, list) else part.replace("~1", "/").replace("~0", "~")]
                if isinstance(found, dict) and "$id" in found:  # its own references are to places within it
                    raise _Lost
        except (LookupError, TypeError, ValueError):
            raise _Lost from None
        if start != "#" or not isinstance(found, dict):
            raise _Lost
        return found

    def _facts(self, schemas: Iterable[Any], but: Collection[str] = ()) -> _Facts:
        """Of schemas that describe an object beside one another. but: keywords of theirs to leave out."""
        facts, seen = _Facts(), set[str]()
        waiting = [{key: each[key] for key in each if key not in but} for each in schemas if isinstance(each, dict)]
        waiting.reverse()
        while waiting:
            if not isinstance(each := waiting.pop(), dict):
                continue
            named, required, reference = each.get("properties", {}), each.get("required", []), each.get("$ref", "")
            lists = {key: each[key] for key in each if key in ("allOf", *_CHOICES)}
            if (
                not isinstance(named, dict)
                or not isinstance(reference, str)
                or any(not isinstance(value, list) for value in (required, *lists.values()))
                or any(not isinstance(name, str) for name in required)
            ):
                raise _Lost
            self._read(1 + len(each) // _KEYS_AS_SCHEMA + _size([*named, *required]))
            facts.names |= dict.fromkeys([*named, *required])
            facts.is_named |= "properties" in each
            # False closes the object: llguidance refuses it, or is told to ignore it.
            facts.is_open |= not _OPENING.isdisjoint(each) or each.get("unevaluatedProperties", False) is not False
            parts: list[Any] = []  # in the order in which llguidance composes them
            for key, value in each.items():
                if key in lists:
                    parts += value
                elif key in ("if", "then", "else"):
                    parts.append(value)
                elif key == "$ref" and reference not in seen:
                    seen.add(reference)
                    parts.append(self._found(reference))
            waiting += parts[::-1]
        return facts

    def _read(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise _Lost


def _size(names: Iterable[str]) -> int:
    return sum(1 + len(name) // _CHARS_AS_NAME for name in names)
