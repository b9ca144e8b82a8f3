"""Lists of distinct items that cannot be listed: what rank 0 needs to know of the schema to keep them distinct.

Such a list stands in a rewritten schema with `uniqueItems` AT_RUN_TIME. Its schema is followed without the keyword. The lists
are found by states of an automaton over the ways to a value, by name or index (`execution.item_text`).
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

from llama_core.text.schema_forms.references import Unsaid
from llama_core.text.schema_forms.terms import Term, matches
from llama_core.text.schema_numbers import PLAIN_VALUES, SCHEMA_MAPS
from llama_core.text.schema_parts import NOTES, NUMBER_LIMITS, listed

AT_RUN_TIME: Final = "at run time"
_COMPARED: Final = frozenset({"null", "boolean", "number", "string"})
_AT_ITS_END, _FEW_VALUES = 1, 2
_REFERENCE: Final = "#/$defs/"


def can_compare(terms: Iterable[Term]) -> bool:
    """Whether no value of the union is a list or an object."""
    return all(term.kind in _COMPARED for term in terms)


def without_unique_lists(schema: Any) -> tuple[Any, dict[str, Any] | None]:
    """A rewritten schema without the keyword, and its lists; None where it has none.

    The lists: `root`, the numbers of the states of the whole value, and `states`. Of a state, `names` has the states of
    properties by name, `others` those of other properties, `first` those of the first items, and `items` those of all behind.
    `is_unique`: the items are distinct. `may_run_out`: 1 if an item that is whole may not become another one, as an integer
    that is 0, and 2 if the values may be few. A value may be in several states, where the
    schema has alternatives: a list that one of them makes unique is kept so.
    """
    automaton = _Automaton(schema)
    lists = automaton.written()
    return (_without(schema) if lists else schema), lists


def _without(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMA_MAPS and isinstance(value, dict):
            found[key] = {name: _without(each) for name, each in value.items()}
        elif key in PLAIN_VALUES:
            found[key] = value
        elif key != "uniqueItems" or value != AT_RUN_TIME:
            found[key] = _without(value)
    return found


class _Automaton:
    """Of one rewritten schema. A state is a schema that applies others to parts of the value; those in place are its own."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._numbers: dict[int, int] = {}  # of schemas, by identity
        self._schemas: list[Mapping[str, Any]] = []

    def written(self) -> dict[str, Any] | None:
        root = self._states([self._root])
        states: list[dict[str, Any]] = []
        while len(states) < len(self._schemas):
            states.append(self._state(self._schemas[len(states)]))
        kept = _reaching_unique(states)
        if not kept:
            return None
        numbers = {state: i for i, state in enumerate(sorted(kept))}
        return {
            "root": [numbers[state] for state in root if state in numbers],
            "states": [_renumbered(states[state], numbers) for state in numbers],
        }

    def _states(self, schemas: Iterable[Any]) -> list[int]:
        """The numbers of the schemas that may apply to a value of these."""
        found: dict[int, None] = {}
        waiting, seen = list(schemas), set[int]()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            if id(schema) not in self._numbers:
                self._numbers[id(schema)] = len(self._schemas)
                self._schemas.append(schema)
            found[self._numbers[id(schema)]] = None
            waiting += self._in_place(schema)
        return sorted(found)

    def _in_place(self, schema: Mapping[str, Any]) -> list[Any]:
        found = [each for key in ("allOf", "anyOf", "oneOf") for each in listed(schema.get(key, []))]
        if str(name := schema.get("$ref", "")).startswith(_REFERENCE):
            found.append(self._root.get("$defs", {}).get(name.removeprefix(_REFERENCE)))
        return found

    def _state(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        others = self._states([*patterns.values(), schema.get("additionalProperties")])
        names = {
            name: self._states([each, *(part for pattern, part in patterns.items() if _may_match(pattern, name))])
            for name, each in named.items()
        }
        contained = listed(schema.get("contains", []))
        state["names"], state["others"] = names, others
        state["first"] = [self._states([each, *contained]) for each in schema.get("prefixItems", [])]
        state["items"] = self._states([schema.get("items"), *contained])
        if schema.get("uniqueItems") == AT_RUN_TIME:
            state["is_unique"] = True
            items = [*schema.get("prefixItems", []), schema.get("items")]
            state["may_run_out"] = max(map(self._may_run_out, items))
        return state

    def _may_run_out(self, schema: Any, depth: int = 8) -> int:
        if not isinstance(schema, dict) or not depth:
            return 0 if schema is False or schema is None else _FEW_VALUES
        keys = schema.keys() - NOTES
        if keys == {"$ref"} or keys == {"anyOf"}:
            return max((self._may_run_out(each, depth - 1) for each in self._in_place(schema)), default=0)
        return max((_of_type(each, keys - {"type"}) for each in listed(schema.get("type", []))), default=_FEW_VALUES)


def _of_type(kind: str, keys: Set[str]) -> int:
    if not keys:
        return _AT_ITS_END if kind in ("integer", "number") else 0
    if kind == "string" and keys <= {"minLength", "maxLength"}:
        return _AT_ITS_END if "maxLength" in keys else 0
    if kind == "number" and keys <= NUMBER_LIMITS - {"multipleOf"}:
        return _AT_ITS_END
    is_open = not keys & {"minimum", "exclusiveMinimum"} or not keys & {"maximum", "exclusiveMaximum"}
    return _AT_ITS_END if kind == "integer" and is_open and keys <= NUMBER_LIMITS - {"multipleOf"} else _FEW_VALUES


def _may_match(pattern: str, name: str) -> bool:
    try:
        return matches(pattern, name)
    except Unsaid:
        return True


def _reaching_unique(states: Sequence[Mapping[str, Any]]) -> set[int]:
    """The states from which a list of distinct items is reached."""
    sources: dict[int, set[int]] = {}
    for i, state in enumerate(states):
        for targets in (state["others"], state["items"], *state["names"].values(), *state["first"]):
            for target in targets:
                sources.setdefault(target, set()).add(i)
    found = {i for i, state in enumerate(states) if state.get("is_unique")}
    waiting = list(found)
    while waiting:
        new = sources.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _renumbered(state: Mapping[str, Any], numbers: Mapping[int, int]) -> dict[str, Any]:
    """The state with the numbers of those that are kept, without what leads nowhere."""

    def kept(targets: Iterable[int]) -> list[int]:
        return [numbers[each] for each in targets if each in numbers]

    found: dict[str, Any] = {key: state[key] for key in ("is_unique", "may_run_out") if state.get(key)}
    found |= {key: kept(state[key]) for key in ("others", "items")}
    # Behind a name that is known, other properties' states do not hold.
    found["names"] = {name: kept(each) for name, each in state["names"].items() if kept(each) or found["others"]}
    found["first"] = [kept(each) for each in state["first"]] if found["items"] or any(map(kept, state["first"])) else []
    return {key: value for key, value in found.items() if value}
