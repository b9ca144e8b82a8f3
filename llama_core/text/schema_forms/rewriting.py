"""Rewrites JSON schemas with keywords that llguidance lacks into schemas without them, for the same values.

`not`, `if`, `oneOf`, `propertyNames`, `unevaluatedProperties` and others become alternatives, each of one type
(`expansion`). Formats that llguidance does not know are dropped: the specification has them as annotations. Where a
keyword has no such form, the schema is not rewritten. For `schema_rules` stay `uniqueItems` with all values listed, `contains`
as a list of its schema, and `{"not": {"type": "integer"}}` of numbers. Where the caller can keep other lists of distinct items
(`unique_lists`), these stay too.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from llama_core.text.schema_forms.expansion import Expansion
from llama_core.text.schema_forms.keywords import COUNTS, KNOWN_FORMATS, known_keywords
from llama_core.text.schema_forms.references import (
    SCHEMA_LISTS,
    SCHEMAS_BY_NAME,
    SINGLE_SCHEMAS,
    Exhausted,
    References,
    Unsaid,
    draft_of,
    in_place,
)
from llama_core.text.schema_forms.writing import Writer
from llama_core.text.schema_parts import NOTES

_MAX_CHARS: Final = 16_384  # of a schema; larger ones take too long
_MAX_DEPTH: Final = 48
_GROWTH: Final = 4  # in characters, beside _FREE_CHARS
_FREE_CHARS: Final = 8192
_EXPANDED: Final = frozenset(
    {"not", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames", "contains", "unevaluatedProperties",
     "unevaluatedItems"}
)  # fmt: skip
_REWRITTEN: Final = _EXPANDED | {"if", "then", "else", "uniqueItems", "minContains", "maxContains", "$dynamicAnchor"}
_NAMED: Final = frozenset({"properties", "patternProperties"})
_NO_CONSTRAINT: Final = NOTES | {
    "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "if", "then", "else", "minContains", "maxContains",
    "contentSchema", "contentEncoding", "contentMediaType",
}  # fmt: skip


class _Refused(Exception):
    """A part of the schema cannot be rewritten, however the schemas around it are. The first argument is this part."""


# The schema is left to llguidance, which refuses it. The standard ones are of parts that are no schemas.
_NOT_REWRITTEN: Final = (
    *(_Refused, Unsaid, Exhausted, RecursionError),
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
)


def rewritten(schema: Any, *, keeps_unique: bool = False) -> Any:
    """The schema without the keywords that llguidance lacks; None where it cannot be rewritten or grows too large.

    keeps_unique: but for `uniqueItems` AT_RUN_TIME of lists whose values cannot be listed.

    Takes some milliseconds, and for the largest schemas some tenths of a second. Raises nothing.
    """
    try:
        if not isinstance(schema, dict) or (num_chars := len(json.dumps(schema))) > _MAX_CHARS:
            return None
        found = _Forms(schema, keeps_unique=keeps_unique).whole()
        limit = _FREE_CHARS + _GROWTH * num_chars
        return found if found is not None and _num_chars(found, {}) <= limit else None
    except _NOT_REWRITTEN:
        return None


def _num_chars(value: Any, counted: dict[int, int]) -> int:
    """About the length of the value as JSON. counted: lengths by identity, because values share parts, which JSON repeats."""
    if not isinstance(value, dict | list):
        return len(json.dumps(value))
    if id(value) not in counted:
        names = sum(len(name) + 6 for name in value) if isinstance(value, dict) else 2 * len(value)
        parts = value.values() if isinstance(value, dict) else value
        counted[id(value)] = 2 + names + sum(_num_chars(each, counted) for each in parts)
    return counted[id(value)]


def refused_keywords(schema: Any, *, keeps_unique: bool = False) -> Any:
    """The schema for an error's place: without the keywords that could be rewritten. What was `oneOf` may be `anyOf`."""
    try:
        if not isinstance(schema, dict) or len(json.dumps(schema)) > _MAX_CHARS:
            return schema
        draft, forms, kept = draft_of(schema), _Forms(schema, keeps_unique=keeps_unique), list[Any]()
        try:
            forms.whole()
        except _Refused as refused:
            kept = forms.refused_within(refused.args[0])
        return _without_rewritten(schema, {id(each) for each in kept}, draft)
    except _NOT_REWRITTEN:
        return schema


def original_place(place: str, schema: Any) -> str:
    """The place within the schema of a place within its `refused_keywords`."""
    steps = re.findall(r"\.[^.\[]+|\[\d+\]", place)
    for i, step in enumerate(steps):
        if step == ".anyOf" and isinstance(schema, dict) and "anyOf" not in schema and "oneOf" in schema:
            steps[i] = step = ".oneOf"
        if step.startswith("."):
            schema = schema.get(step[1:]) if isinstance(schema, dict) else None
        else:
            members = list(schema.values() if isinstance(schema, dict) else schema or ())
            schema = next(iter(members[int(step[1:-1]) :]), None)
    return "".join(steps)


def _without_rewritten(schema: Any, kept: set[int], draft: int) -> Any:
    if isinstance(schema, list):
        return [_without_rewritten(each, kept, draft) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            found[key] = {name: _without_rewritten(each, kept, draft) for name, each in value.items()}
        elif key in (*SCHEMA_LISTS, *SINGLE_SCHEMAS):
            found[key] = _without_rewritten(value, kept, draft)
        else:
            found[key] = value
    if id(schema) in kept:
        return found
    try:
        known = known_keywords(schema, draft)
    except Unsaid:
        return found
    found = {key: value for key, value in found.items() if key not in _REWRITTEN}
    found |= {key: known[key] for key in COUNTS if key in found and key in known}
    if "oneOf" in found and "anyOf" not in found:
        found = {"anyOf" if key == "oneOf" else key: value for key, value in found.items()}
    return {key: value for key, value in found.items() if key != "format" or value in KNOWN_FORMATS}


class _Forms:
    """The schemas of one whole schema."""

    def __init__(self, root: dict[str, Any], *, keeps_unique: bool = False) -> None:
        self._root = root
        self._references = References(root)
        self._expansion = Expansion(self._references)
        self._writer = Writer(self._expansion, keeps_unique=keeps_unique)
        self._done: dict[Any, Any] = {}
        self._begun: set[Any] = set()
        self._names: dict[Any, str] = {}  # of definitions
        self._unread: list[tuple[Any, Any]] = []
        self._definitions: dict[str, Any] = {}
        self._kept: list[Any] = []  # schemas that were made, so that their identities stay theirs

    def whole(self) -> dict[str, Any] | None:
        root = self._inner(self._root)
        while self._unread:
            key, schema = self._unread.pop()
            self._definitions[self._names[key]] = self._inner(schema)
        if root is False:
            return None
        kept = {key: self._root[key] for key in ("x-guidance",) if key in self._root}
        definitions = {"$defs": self._definitions} if self._definitions else {}
        return ({} if root is True else root) | kept | definitions

    def refused_within(self, schema: Any) -> list[Any]:
        """The schemas in place in a refused one that are refused by themselves."""
        return [each for each in in_place(schema) if self._is_refused(each)]

    def _is_refused(self, schema: Any) -> bool:
        try:
            self._in_place(schema)
        except (_Refused, Unsaid, Exhausted):
            return True
        return False

    def _inner(self, schema: Any) -> Any:
        """A schema of items, properties or a definition."""
        key = self._key(schema)
        if key in self._done:
            return self._done[key]
        if key in self._begun:  # it holds itself
            return {"$ref": f"#/$defs/{self._name(key, None)}"}
        if len(self._begun) > _MAX_DEPTH:
            raise _Refused(schema)
        self._begun.add(key)
        self._kept.append(schema)
        try:
            found = self._done[key] = self._in_place(schema)
        except Unsaid:
            raise _Refused(schema) from None
        finally:
            self._begun.discard(key)
        if key in self._names:
            self._definitions[self._names[key]] = found
        return found

    def _in_place(self, schema: Any) -> Any:
        """Raises Unsaid where it may be rewritten together with the schema in which it stands."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Unsaid
        known = known_keywords(schema, self._references.draft)
        is_joined = "allOf" in known or ("$ref" in known and bool(known.keys() - NOTES - {"$ref"}))
        if not self._needs_expansion(known):
            try:
                return self._expanded(schema) if is_joined else self._copied(known, schema)
            except Unsaid:
                if is_joined:
                    return self._copied(known, schema)
        return self._expanded(schema)

    def _needs_expansion(self, known: Mapping[str, Any]) -> bool:
        return (
            not _EXPANDED.isdisjoint(known)
            or ("if" in known and ("then" in known or "else" in known))
            or known.get("uniqueItems", False) is not False
            or any(
                isinstance(each, dict) and self._needs_expansion(known_keywords(each, self._references.draft))
                for each in known.get("allOf", ())
            )
        )

    def _expanded(self, schema: Any) -> Any:
        written = self._writer.written(self._expansion.terms(schema))
        if isinstance(written, bool):
            return written
        self._kept.append(written)
        if written.keys() == {"anyOf"}:
            return {"anyOf": [self._copied(each, each) for each in written["anyOf"]]}
        return self._copied(written, written)

    def _copied(self, known: Mapping[str, Any], schema: Any) -> dict[str, Any]:
        """The schema with its parts rewritten, each by itself."""
        copied: dict[str, Any] = {}
        for key, value in known.items():
            if key in _NAMED and isinstance(value, dict):
                copied[key] = {name: self._inner(each) for name, each in value.items()}
            elif key in ("items", "additionalProperties"):
                copied[key] = self._inner(value)
            elif key in ("prefixItems", "contains") and isinstance(value, list):
                copied[key] = [self._inner(each) for each in value]
            elif key in ("allOf", "anyOf") and isinstance(value, list):
                copied.setdefault(key, []).extend(self._in_place(each) for each in value)
            elif key == "oneOf" and isinstance(value, list):
                if not self._expansion.are_disjoint([self._expansion.terms(each) for each in value]):
                    raise Unsaid
                union = {"anyOf": [self._in_place(each) for each in value]}
                copied |= union if "anyOf" not in known else {"allOf": [*copied.get("allOf", []), union]}
            elif key in ("$ref", "$dynamicRef"):
                copied["$ref"] = self._reference(schema)
            elif key not in _NO_CONSTRAINT and not (key == "uniqueItems" and value is False):
                copied[key] = value
        if "contains" in copied:
            copied |= {key: known[key] for key in ("minContains", "maxContains") if key in known}
        return copied

    def _reference(self, schema: Any) -> str:
        target = self._references.target(schema)
        return f"#/$defs/{self._name(self._key(target), target)}"

    def _name(self, key: Any, schema: Any) -> str:
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            if key in self._done:
                self._definitions[self._names[key]] = self._done[key]
            elif key not in self._begun:
                self._unread.append((key, schema))
        return self._names[key]

    def _key(self, schema: Any) -> Any:
        """What schemas have in common that are the same, or made from the same ones."""
        if not isinstance(schema, dict):
            return schema if isinstance(schema, bool) else id(schema)
        if len(schema) == 1:
            (key, value), *_ = schema.items()
            if key in ("allOf", "anyOf") and isinstance(value, list):
                return key, *map(self._key, value)
            if key == "not":
                return key, self._key(value)
        return id(schema)
