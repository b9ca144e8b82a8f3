"""Finds the place in a JSON schema at which llguidance refuses it. Called only where it does.

llguidance names no place, and its messages quote the schema, which errors of this server never do. So this module searches for
the place in two ways, and has its own words for each kind of fault. Most faults lie in one keyword: each part of the schema
that has it is compiled alone, with that keyword. Other faults lie between keywords: parts of the schema are compiled in halves,
down to the innermost one that is refused for the same reason.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from llama_core.text.grammar_words import is_too_large, regex_fault
from llama_core.text.schema_candidates import DRAFTS, Candidate, candidates
from llama_core.text.schema_places import KEYWORDS, SCHEMA_LISTS, TYPES, SchemaTree, Target, parts

# Of the search; a compilation that has begun is not broken off.
_MAX_SECONDS: Final = 0.05
_MAX_DEPTH: Final = 124  # that llguidance reads
_MAX_PARTS: Final = 1000  # that are searched on the event loop
_MAX_CHARS: Final = 2**15  # of what is compiled at once: about 25 ms
# How llguidance's message begins, by the kind of the fault.
_KINDS: Final = tuple(
    (kind, re.compile(beginning))
    for kind, beginning in (
        ("keyword", r"Unimplemented keys: "),
        ("type", r"Invalid type: |type must be a string"),
        ("reference", r"Pointer '|Anchor '|Resource '"),
        ("uri", r"Invalid URI reference"),
        ("circle", r"circular references"),
        ("regex", r"regex parse error:|lookarounds not supported"),
        ("format", r"Unknown format: "),
        ("value", r"Expected .* for '|schema must be an object|[$\w]+ must be an? (?:string|array|object)"),
        ("contradiction", r"Unsatisfiable schema: "),
        ("oneOf", r"oneOf constraints are not supported"),
        ("counts", r"min/maxProperties only supported"),
        ("overlap", r"patternProperty regexes|can't determine if patternProperty"),
        ("multiple", r"Value for 'multipleOf'|invalid multiple of"),
        ("options", r"unknown field `|invalid type: |invalid value: "),
        ("depth", r"recursion limit exceeded"),
        ("undecided", r"Unable to determine if regex is empty"),
    )
)
_PREFIX: Final = re.compile(r'(at \d+\(\d+\): failed to compile JSON schema|failed to parse "%json"): ')
_UNSATISFIABLE: Final = re.compile(
    r"Unsatisfiable schema: (?:(\w+) \([^()]*\) is (greater than|equal to) (\w+)|(\w+) > (\w+))"
)
_QUOTED: Final = re.compile(r'"([$\w]+)"')
_NOT_A_SCHEMA: Final = "must be a JSON schema: an object, true or false"
_FALSE: Final = "no value satisfies false, and one is needed"
_NO_VALUE: Final = "no value satisfies all of its keywords"
# Of a part for which no keyword is found.
_REASONS: Final = {
    "keyword": "a keyword is not supported",
    "type": f"type must be one of {', '.join(TYPES)}, or a list of them",
    "reference": "a $ref names no part of the schema",
    "uri": "a $ref or $id is not a valid URI reference",
    "circle": "a schema that refers to itself may have no other keywords beside $ref",
    "regex": "a pattern is not a regular expression that can be followed",
    "format": "a format is not supported",
    "value": "a keyword has a value of the wrong type",
    "contradiction": _NO_VALUE,
    "oneOf": "alternatives of oneOf that may overlap are not supported: use anyOf",
    "counts": "minProperties and maxProperties are supported only where all properties are required",
    "overlap": "the expressions of patternProperties must exclude each other",
    "multiple": "multipleOf must be greater than 0, and have few digits",
    "depth": f"may be nested {_MAX_DEPTH} levels deep at most",
    "undecided": "a pattern is too complex beside the limits of the text's length",
    "size": "is too large or too complex",
    "": "is not a JSON schema that can be followed",
}
_IGNORED: Final = frozenset({"keyword", "format", "oneOf", "counts"})

# llguidance's problem with a schema, or "".
ProblemOf = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Fault:
    """place: within the schema, "" for the whole. reason: says nothing of the schema but keywords. is_lenient: llguidance's
    option `lenient` leaves the keyword out."""

    place: str
    reason: str
    is_lenient: bool = False

    def message(self, param: str) -> str:
        return f"{param}{self.place}: {self.reason}"


def schema_fault(schema: Any, problem: str, problem_of: ProblemOf) -> Fault:
    """The innermost place of `schema` for which llguidance has `problem`, of which `problem_of` tells the same for parts.

    Takes up to 50 ms and the time of one compilation. Where that does not suffice, the place is an outer one.
    """
    kind = _kind_of(problem)
    fault = _Search(schema, kind, problem_of).fault()
    if fault.reason == _REASONS["keyword"]:  # in a resource with an $id of its own
        names = [f"the keyword {name}" for name in _QUOTED.findall(problem) if name in KEYWORDS]
        fault = replace(fault, reason=f"{(*names, 'a keyword')[0]} is not supported")
    return replace(fault, is_lenient=kind in _IGNORED)


def schema_reason(problem: str) -> str:
    """llguidance's problem with a schema, without a quote of it."""
    return _REASONS.get(_kind_of(problem), _REASONS[""])


def unwritable_fault(schema: Any, error: Exception) -> Fault:
    """Why a schema is no JSON text that llguidance reads, where writing or reading it raised `error`."""
    if isinstance(error, RecursionError) or "recursion limit" in str(error):
        return Fault("", _REASONS["depth"])
    for place, part in islice(SchemaTree(schema).reachable(), _MAX_PARTS):
        for key, value in part.items() if isinstance(part, dict) else ():
            if key in KEYWORDS and isinstance(value, float) and not math.isfinite(value):
                return Fault(f"{place}.{key}", "must be a finite number")
    return Fault("", "must be JSON, without lone surrogates and with finite numbers")


def negative_multiple(schema: Any) -> Fault | None:
    """The first negative `multipleOf` of a schema, if it has one: llguidance takes it for a positive one."""
    for place, part in islice(SchemaTree(schema).reachable(), _MAX_PARTS):
        value = part.get("multipleOf") if isinstance(part, dict) else None
        if isinstance(value, int | float) and value < 0:
            return Fault(f"{place}.multipleOf", _REASONS["multiple"].removeprefix("multipleOf "))
    return None


def _kind_of(problem: str) -> str:
    problem = problem[found.end() :] if (found := _PREFIX.match(problem)) else problem
    known = next((kind for kind, beginning in _KINDS if beginning.match(problem)), "")
    return known or ("size" if is_too_large(problem) else "")


class _Search:
    """The search for a fault of one kind."""

    def __init__(self, root: Any, kind: str, problem_of: ProblemOf) -> None:
        self._tree = SchemaTree(root)
        self._kind = kind
        self._problem_of = problem_of
        self._until = time.thread_time() + _MAX_SECONDS
        draft = root.get("$schema") if isinstance(root, dict) else None
        self._draft = {"$schema": draft} if isinstance(draft, str) and DRAFTS.fullmatch(draft) else {}
        self._known: dict[str, str] = {}  # problems, by what was compiled

    def fault(self) -> Fault:
        if self._kind == "options":
            return Fault(".x-guidance", "has an option that does not exist, or a wrong value")
        if self._kind == "depth":
            return Fault("", _REASONS["depth"])
        if self._kind == "circle":
            return self._circle()
        return self._in_a_keyword() or self._between_keywords()

    def _in_a_keyword(self) -> Fault | None:
        for place, schema in self._places():
            if isinstance(schema, dict):
                for candidate in candidates(self._kind, schema, self._tree):
                    if self._is_late():
                        return None
                    if self._is_refused(candidate.alone):
                        return self._found(place, schema, candidate)
            elif self._kind == "value" and not isinstance(schema, bool):
                return Fault(place, _NOT_A_SCHEMA)
            elif self._kind == "contradiction" and schema is False:
                return Fault(place, _FALSE)
        return None

    def _places(self) -> Iterator[tuple[str, Any]]:
        if self._kind == "contradiction":  # optional parts may contradict themselves
            return self._tree.needed()
        # References are resolved everywhere, before anything is compiled.
        return self._tree.reachable(definitions=self._kind in ("reference", "uri"))

    def _found(self, place: str, schema: dict[str, Any], candidate: Candidate) -> Fault:
        if self._kind == "contradiction":
            return _contradiction(place, schema, self._problem(candidate.alone))
        reason = candidate.reason
        if self._kind == "regex" and (pattern := candidate.alone.get("pattern")) is not None:
            from llguidance import regex_to_lark  # loaded by the first request with a grammar

            found = self._problem(candidate.alone)
            reason = regex_fault(found, pattern, lambda regex: regex_to_lark(regex, "dw")).reason
        return Fault(place + candidate.place, reason)

    def _circle(self) -> Fault:
        for place, schema in self._tree.reachable():
            if self._is_late():
                break
            named = self._tree.target(schema.get("$ref")) if isinstance(schema, dict) and len(schema) > 1 else None
            if named is not None and any(
                isinstance(inner, dict)
                and (again := self._tree.target(inner.get("$ref"))) is not None
                and again.schema is named.schema
                for _, inner in self._tree.reachable("", named.schema)
            ):
                return Fault(f"{place}.$ref", _REASONS["circle"])
        return Fault("", _REASONS["circle"])

    def _between_keywords(self) -> Fault:
        place, schema = "", self._tree.root
        opened: list[Any] = []  # the part and the schemas around it, whose own fault is not that of what is within
        while not self._is_late():
            opened.append(schema)
            inner = self._refused_within(place, schema, opened)
            if inner is None:
                break
            place, schema = inner
        return self._named(place, schema, opened)

    def _refused_within(self, place: str, schema: Any, opened: Sequence[Any]) -> tuple[str, Any] | None:
        is_needed = self._kind == "contradiction"  # optional parts may contradict themselves
        within = [(place + part.place, part.schema) for part in parts(schema) if part.is_needed or not is_needed]
        within += self._tree.referred(place, schema)
        found = self._refused_of(within, opened)
        if found is None and is_needed:  # every schema that is named must be satisfied, also one that is optional
            named = [self._tree.referred(*inner) for inner in self._tree.reachable(place, schema)]
            found = self._refused_of([each for one in named for each in one], opened)
        return found

    def _refused_of(self, within: Sequence[tuple[str, Any]], opened: Sequence[Any]) -> tuple[str, Any] | None:
        """The one that is refused for the same reason by itself."""
        within = [each for each in within if not any(each[1] is outer for outer in opened)]
        if not within or self._is_late():
            return None
        if sum(len(str(schema)) for _, schema in within) < _MAX_CHARS:
            if not self._is_refused(self._together(within, opened), is_kept=False):
                return None
            if len(within) == 1:
                return within[0]
        elif len(within) == 1:
            return None
        half = (len(within) + 1) // 2
        return self._refused_of(within[:half], opened) or self._refused_of(within[half:], opened)

    def _together(self, within: Sequence[tuple[str, Any]], opened: Sequence[Any]) -> dict[str, Any]:
        copied, definitions = _Copy(self._tree, opened).of([schema for _, schema in within])
        named = {str(i): each for i, each in enumerate(copied)}
        # A part that contradicts itself hides no other fault where it may be left out.
        required = list(named) if self._kind == "contradiction" else []
        members = {"type": "object", "properties": named, "required": required, "additionalProperties": False}
        return members | definitions

    def _named(self, place: str, schema: Any, opened: Sequence[Any]) -> Fault:
        """The fault of the innermost part, with its keyword if it is known."""
        if schema is False:
            return Fault(place, _FALSE)
        if self._kind == "contradiction" and isinstance(schema, dict) and not self._is_late():
            (copied,), definitions = _Copy(self._tree, opened).of([schema])
            return _contradiction(place, schema, self._problem(copied | definitions))
        candidate = None if self._is_late() else next(candidates(self._kind, schema, self._tree), None)
        if candidate is None:
            return Fault(place, _REASONS[self._kind])
        return Fault(place + candidate.place, candidate.reason)

    def _is_late(self) -> bool:
        return time.thread_time() > self._until

    def _is_refused(self, schema: dict[str, Any], *, is_kept: bool = True) -> bool:
        """Whether the schema alone is refused for the same kind of reason. is_kept: for schemas like it."""
        problem = self._problem(schema) if is_kept else self._problem_of(self._draft | schema)
        return bool(problem) and _kind_of(problem) == self._kind

    def _problem(self, schema: dict[str, Any]) -> str:
        key = repr(schema)
        if key not in self._known:
            self._known[key] = self._problem_of(self._draft | schema)
        return self._known[key]


class _Copy:
    """Copies parts of a schema so that they can be compiled alone: with what their references name, and without notes."""

    def __init__(self, tree: SchemaTree, opened: Sequence[Any]) -> None:
        self._tree = tree
        self._opened = {id(each) for each in opened}
        self._numbers: dict[int, int] = {}  # of definitions, by the identity of what is named
        self._named: list[Any] = []

    def of(self, schemas: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The copies, and the definitions that must stand beside them."""
        copies = [self._copy(schema) for schema in schemas]
        definitions: dict[str, Any] = {}
        while len(definitions) < len(self._named):
            definitions[str(len(definitions))] = self._copy(self._named[len(definitions)])
        return copies, {"$defs": definitions} if definitions else {}

    def _copy(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        copied: dict[str, Any] = {}
        for key, value in schema.items():
            if key == "$ref" and (named := self._tree.target(value)) is not None:
                if id(named.schema) not in self._opened:  # else any value
                    copied[key] = f"#/$defs/{self._number(named)}"
            elif key in ("properties", "patternProperties") and isinstance(value, dict):
                copied[key] = {name: self._copy(each) for name, each in value.items()}
            elif key in (*SCHEMA_LISTS, "prefixItems", "items") and isinstance(value, list):
                copied[key] = [self._copy(each) for each in value]
            elif key in ("items", "additionalItems", "additionalProperties"):
                copied[key] = self._copy(value)
            elif key in KEYWORDS and key not in ("$defs", "definitions", "$schema", "$id", "id", "$anchor"):
                copied[key] = value
        return copied

    def _number(self, named: Target) -> int:
        if id(named.schema) not in self._numbers:
            self._numbers[id(named.schema)] = len(self._named)
            self._named.append(named.schema)
        return self._numbers[id(named.schema)]


def _contradiction(place: str, schema: dict[str, Any], problem: str) -> Fault:
    if (found := _UNSATISFIABLE.match(problem)) is not None:
        first, relation, second = found[1] or found[4], found[2] or "greater than", found[3] or found[5]
        if first == "required" and first in schema and second in schema:
            return Fault(f"{place}.required", "names more properties than maxProperties allows")
        if first in KEYWORDS and first in schema and second in schema:  # else parts of allOf have them
            return Fault(f"{place}.{first}", f"is {relation} {second}")
        if first == "minProperties" and first in schema:
            return Fault(f"{place}.{first}", "is greater than the number of properties that the schema allows")
    for key in ("enum", "anyOf", "oneOf"):
        if schema.get(key) == []:
            return Fault(f"{place}.{key}", "must have an element")
    properties, required = schema.get("properties", {}), schema.get("required")
    if schema.get("additionalProperties") is False and isinstance(properties, dict) and isinstance(required, list):
        for i, name in enumerate(required):
            if name not in properties:
                return Fault(f"{place}.required[{i}]", "names a property that additionalProperties forbids")
    if "pattern" in schema and schema.keys() & {"minLength", "maxLength", "format"}:
        return Fault(f"{place}.pattern", "no text satisfies it with minLength, maxLength and format")
    return Fault(place, _NO_VALUE)
