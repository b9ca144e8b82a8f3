"""Writes a JSON schema as a union of terms."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Final

from llama_core.text.schema_forms.algebra import negated, product
from llama_core.text.schema_forms.keywords import known_keywords, own_terms
from llama_core.text.schema_forms.references import LATEST, Budget, References, Unsaid
from llama_core.text.schema_forms.terms import EVERYTHING, NOTHING, Term, both, item_schema, matches, tidy

_MAX_STEPS: Final = 3000  # for one whole schema
_MAX_BRANCHES: Final = 6  # of anyOf beside unevaluatedProperties and unevaluatedItems, whose subsets are written out
_MAX_DEPTH: Final = 3  # of schemas within others in which a contradiction is looked for
_NONE: Final = 2**31  # the place of no open schema


@dataclass(slots=True)
class _Open:
    """A schema that is being expanded. outermost: the place in `Expansion._open` of the outermost schema to which it refers.
    unsaid: schemas that cannot be said while this one is open, because they refer to it.
    """

    schema: int
    outermost: int = _NONE
    unsaid: list[tuple[int, bool]] = field(default_factory=list)


class Expansion:
    """Of the schemas of one whole schema."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._budget = Budget(_MAX_STEPS)
        self._known: dict[tuple[int, bool], list[Term]] = {}
        # `_Open.outermost` of those that raise, as each step of a circle does: most once and for all, some while it is open.
        self._unsaid: dict[tuple[int, bool], int] = {}
        self._open: list[_Open] = []  # schemas in place that are being expanded

    def terms(self, schema: Any, *, annotated: bool = False) -> list[Term]:
        """annotated: with what unevaluated keywords around it must know. Raises Unsaid."""
        if isinstance(schema, bool):
            return EVERYTHING if schema else []
        if not isinstance(schema, dict):
            raise Unsaid
        place = next((i for i, each in enumerate(self._open) if each.schema == id(schema)), None)
        if place is not None:
            self._refers_to(place)
            raise Unsaid
        key = id(schema), annotated
        if (known := self._known.get(key)) is not None:
            return known
        if (place := self._unsaid.get(key)) is not None:
            self._refers_to(place)
            raise Unsaid
        self._budget.spend()
        here = _Open(id(schema))
        self._open.append(here)
        try:
            found = self._terms(known_keywords(schema, self._references.draft), schema, annotated)
            if self._references.is_original(schema):
                self._known[key] = found
            return found
        except (Unsaid, TypeError, AttributeError):  # also keywords with values of other types
            if self._references.is_original(schema):
                self._unsaid[key] = here.outermost if here.outermost < len(self._open) - 1 else _NONE
                if self._unsaid[key] != _NONE:
                    self._open[here.outermost].unsaid.append(key)
            raise Unsaid from None
        finally:
            self._open.pop()
            self._refers_to(here.outermost)
            for each in here.unsaid:
                self._unsaid.pop(each, None)

    def _refers_to(self, place: int) -> None:
        """Note in the innermost open schema that it refers to one that is open around it."""
        if self._open:
            self._open[-1].outermost = min(self._open[-1].outermost, place)

    def _terms(self, known: dict[str, Any], schema: Any, annotated: bool) -> list[Term]:
        annotated = annotated or "unevaluatedProperties" in known or "unevaluatedItems" in known
        found = [term for each in own_terms(known) if (term := tidy(each)) is not None]
        for union in self._applied(known, schema, annotated):
            found = self.product(found, union)
        found = [term for term in found if not self.is_empty(term)]
        if "unevaluatedProperties" in known or "unevaluatedItems" in known:
            if self._references.draft < LATEST and any(term.seen.contained for term in found):
                raise Unsaid  # whether contains evaluates items
            found = [closed for term in found if (closed := tidy(_closed(term, known))) is not None]
        return found

    def _applied(self, known: Mapping[str, Any], schema: Any, annotated: bool) -> Iterator[list[Term]]:
        """The unions of the keywords that apply other schemas in place."""

        def of(each: Any) -> list[Term]:
            return self.terms(each, annotated=annotated)

        for each in known.get("allOf", ()):
            yield of(each)
        if "anyOf" in known:
            unions = [of(each) for each in known["anyOf"]]
            yield self._any_of(unions) if annotated else [term for union in unions for term in union]
        if "oneOf" in known:
            yield self.one_of([of(each) for each in known["oneOf"]])
        if "$ref" in known or "$dynamicRef" in known:
            yield of(self._references.target(schema))
        if "not" in known:
            yield self._negated(known["not"])
        if "if" in known and ("then" in known or "else" in known or annotated):
            condition = of(known["if"])
            otherwise = self.product(self._negated(known["if"]), of(known.get("else", True)))
            yield self.product(condition, of(known.get("then", True))) + otherwise
        for name, dependent in self._dependencies(known):
            needed = (
                Term("object", {"required": tuple(dict.fromkeys((name, *dependent)))})
                if isinstance(dependent, list)
                else None
            )
            with_it = [needed] if needed else self.product([Term("object", {"required": (name,)})], of(dependent))
            absent = Term("object", {"properties": {name: False}})
            yield [*(term for term in EVERYTHING if term.kind != "object"), absent, *with_it]

    def _dependencies(self, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            yield from known.get(key, {}).items()

    def _any_of(self, unions: Sequence[list[Term]]) -> list[Term]:
        """The terms of one or more of the unions, with the annotations of all that a value follows."""
        if not any(term.seen != NOTHING for union in unions for term in union):
            return [term for union in unions for term in union]
        if len(unions) > _MAX_BRANCHES:
            raise Unsaid
        found: list[Term] = []
        for union in unions:
            found += [*union, *self.product(found, union)]
        return found

    def product(self, first: Sequence[Term], second: Sequence[Term]) -> list[Term]:
        return product(first, second, self._budget)

    def _negated(self, schema: Any) -> list[Term]:
        return negated(self.terms(schema), self._budget)

    def one_of(self, unions: Sequence[list[Term]]) -> list[Term]:
        """The terms that exactly one of the unions has."""
        if self.are_disjoint(unions):
            return [term for union in unions for term in union]
        others = [negated(union, self._budget) for union in unions]
        return [
            term
            for i, union in enumerate(unions)
            for term in reduce(self.product, (other for j, other in enumerate(others) if j != i), union)
            if not self.is_empty(term)
        ]

    def are_disjoint(self, unions: Sequence[list[Term]]) -> bool:
        return all(
            self.is_empty(term)
            for i, union in enumerate(unions)
            for other in unions[i + 1 :]
            for term in self.product(union, other)
        )

    def is_empty(self, term: Term, depth: int = 0) -> bool:
        """Whether surely no value follows the term. Only what joining has made is looked into."""
        keys = term.keys
        needed = [keys.get("properties", {}).get(name) for name in keys.get("required", ())]
        needed += [
            item_schema(keys, i) for i in range(min(keys.get("minItems", 0), len(keys.get("prefixItems", ())) + 1))
        ]
        return depth < _MAX_DEPTH and any(
            isinstance(each, dict) and ("allOf" in each or "not" in each) and self._has_no_value(each, depth + 1)
            for each in needed
        )

    def _has_no_value(self, schema: Any, depth: int) -> bool:
        try:
            return all(self.is_empty(term, depth) for term in self.terms(schema))
        except Unsaid:
            return False


def _closed(term: Term, known: Mapping[str, Any]) -> Term:
    """The term with the unevaluated keywords of its schema, behind which everything is evaluated."""
    seen, keys = term.seen, dict(term.keys)
    if term.kind == "object" and "unevaluatedProperties" in known:
        rest = known["unevaluatedProperties"]
        if not seen.all_names:
            properties, patterns = keys.get("properties", {}), keys.get("patternProperties", {})
            if keys.get("additionalProperties", True) is not True or set(patterns) != seen.patterns:
                raise Unsaid
            keys["properties"] = {
                name: schema
                if name in seen.names or (rest is not True and any(matches(pattern, name) for pattern in patterns))
                else both(schema, rest)
                for name, schema in properties.items()
            } | {name: True for name in seen.names if name not in properties}
            keys["additionalProperties"] = rest
        return replace(term, keys=keys, seen=replace(seen, all_names=True))
    if term.kind == "array" and "unevaluatedItems" in known:
        rest = known["unevaluatedItems"]
        if seen.num_items < math.inf:
            rest = {"anyOf": [rest, *seen.contained]} if seen.contained and rest is not True else rest
            rest = seen.contained[0] if len(seen.contained) == 1 and known["unevaluatedItems"] is False else rest
            prefix = keys.get("prefixItems", ())
            keys["prefixItems"] = tuple(
                each if i < seen.num_items else both(each, rest) for i, each in enumerate(prefix)
            ) + tuple(keys.get("items", True) for _ in range(len(prefix), int(seen.num_items)))
            keys["items"] = both(keys.get("items", True), rest)
        return replace(term, keys=keys, seen=replace(seen, num_items=math.inf))
    return term
