"""Structural tags in vLLM's newer form, `{"type": "structural_tag", "format": {...}}`, as a grammar of llguidance's Lark.

The formats are those of XGrammar (its docs/structural_tag): texts, JSON, patterns and grammars, and what joins them. Each
becomes the ways in which the answer goes on from where it stands (`lark_rules.Path`).
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from llguidance import regex_to_lark

from deployments.http.errors import Unsupported
from deployments.http.field_types import integer
from deployments.http.lark_rules import LarkRules, Path, Paths, before, expression, literal
from llama_core.errors import InvalidParameter
from llama_core.text import grammar as grammars
from llama_core.text.schema_faults import negative_multiple
from llama_core.text.schema_numbers import bounded_schema
from llama_core.text.tools.schema_grammar import compiled_schema

FIELDS: Final = ("response_format", "structured_outputs.structural_tag")
MAX_PARTS: Final = 512
MAX_DEPTH: Final = 32
MAX_TEXTS: Final = 128  # of one list: tags, triggers, ends, excludes
MAX_TEXT_CHARS: Final = 4096
MAX_REPEATS: Final = 1000
_MAX_PATHS: Final = 256
# White space is what `json.dumps` writes, or none: spaces cannot go on for ever, and the matcher sees words of one kind only.
_SPACING: Final = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
_LEAF: Final = re.compile(r"^// (\S+)\n\w+: (.*)$", re.MULTILINE)
_UNSUPPORTED: Final = (
    "dispatch", "token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch", "qwen_xml_parameter"
)  # fmt: skip
Format = Mapping[str, Any]


def parsed(given: Any, param: str) -> Any:
    """A structural tag, which vLLM's clients may send as a text."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        raise _invalid(param, "the text is not JSON") from None


def structural_tag_grammar(given: object, param: str) -> str:
    """The grammar of `given`, the value of a structural tag's `format`, unchecked.

    param: the field that has it. Raises InvalidParameter or Unsupported that names the part.
    """
    formats = _Formats()
    start = formats.paths(given, f"{param}.format", (), (Path(),), MAX_DEPTH)
    return formats.grammar.source(start)


def refused_part(by: grammars.Checks, grammar: str, param: str) -> InvalidParameter | None:
    """Which part of a structural tag's grammar that does not compile is at fault, and why; None if no part alone is."""
    if param not in FIELDS:
        return None  # the grammar may be the client's text
    first, *others = json.loads(grammar)["grammars"]
    named = {other["name"]: other for other in others if "name" in other}
    for place, body in _LEAF.findall(first.get("lark_grammar") or ""):
        try:
            if body.startswith("%json "):
                schema = json.loads(body.removeprefix("%json "))
                schema.pop("x-guidance", None)
                compiled_schema(json.dumps(schema), True)
            else:
                source = named[body[1:]]["lark_grammar"] if body.startswith("@") else f"start: {body}"
                by.checked_grammar(json.dumps({"grammars": [{"lark_grammar": source}]}), place)
        except InvalidParameter as error:
            if body.startswith("%json "):
                # A structural tag has no `strict`, of which the words for tools speak.
                reason, where = error.message.partition(" in a strict schema")[0], place + (error.param or "")
                return InvalidParameter(f"{where}: {reason}", param=where)
            return error
    return None


class _Formats:
    """Makes a grammar of the formats of one structural tag."""

    def __init__(self) -> None:
        self.grammar = LarkRules()
        self._num_parts = 0

    def paths(self, given: object, place: str, ends: tuple[str, ...], after: Paths, depth: int) -> Paths:
        """The format `given`, and what follows it. ends: of the innermost tag around it, which free text leaves out."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS or not depth:
            raise _invalid(place, f"a structural tag has at most {MAX_PARTS} parts, {MAX_DEPTH} levels deep")
        if not isinstance(given, dict) or not isinstance(kind := given.get("type"), str):
            raise _invalid(place, "must be an object with a type")
        if kind not in _KINDS:
            raise Unsupported(
                f"{place}.type: {'this type is not supported by this server' if kind in _UNSUPPORTED else 'is unknown'}: "
                f"the types are {', '.join(_KINDS)}",
                param=f"{place}.type",
            )
        if len(after) > _MAX_PATHS:
            after = (self.grammar.rule(self.grammar.alternatives(after)),)
        return _KINDS[kind](_Part(self, given, place, ends, after, depth - 1))


@dataclass(frozen=True, slots=True)
class _Part:
    """One format of a structural tag where it stands."""

    formats: _Formats
    given: Format
    place: str
    ends: tuple[str, ...]
    after: Paths
    depth: int

    @property
    def grammar(self) -> LarkRules:
        return self.formats.grammar

    def inner(self, name: str, after: Paths, ends: tuple[str, ...] | None = None) -> Paths:
        """The format in a field, followed by `after`."""
        ends = self.ends if ends is None else ends
        return self.formats.paths(self.given.get(name), f"{self.place}.{name}", ends, after, self.depth)

    def string(self, name: str) -> str:
        value = self.given.get(name)
        if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
            raise _invalid(f"{self.place}.{name}", f"must be a text of at most {MAX_TEXT_CHARS} characters")
        return value

    def strings(self, name: str) -> list[str]:
        value = self.given.get(name) or []
        is_list = isinstance(value, list) and len(value) <= MAX_TEXTS
        if not is_list or not all(isinstance(each, str) and 0 < len(each) <= MAX_TEXT_CHARS for each in value):
            raise _invalid(
                f"{self.place}.{name}",
                f"must be a list of at most {MAX_TEXTS} texts, none of them empty or longer than {MAX_TEXT_CHARS} characters",
            )
        return list(value)

    def items(self, name: str) -> list[Any]:
        value = self.given.get(name)
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_TEXTS:
            raise _invalid(f"{self.place}.{name}", f"must be a list of 1 to {MAX_TEXTS} formats")
        return value

    def flag(self, name: str) -> bool:
        value = self.given.get(name)
        if not isinstance(value, bool | None):
            raise _invalid(f"{self.place}.{name}", "must be true or false")
        return bool(value)

    def number(self, name: str, least: int, most: int) -> int:
        value = integer(self.given.get(name))
        if type(value) is not int or not least <= value <= most:
            raise _invalid(f"{self.place}.{name}", f"must be an integer from {least} to {most}")
        return value

    def refuse(self, name: str, *neutral: object) -> None:
        """Raises Unsupported unless the field is absent, or has one of these values."""
        value = self.given.get(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in neutral):
            param = f"{self.place}.{name}"
            raise Unsupported(f"{param}: this value is not supported by this server", param=param)

    def endings(self) -> tuple[str, ...]:
        """Beside `ends`, the texts that free text leaves out: what follows it begins where it ends."""
        if not any(path.tail for path in self.after):
            return ()  # one regular expression to the end of the answer
        if not all(path.begins for path in self.after):
            raise _invalid(
                self.place, "free text may only be followed by a fixed text or a tag, or end a tag or the answer"
            )
        return tuple(path.begins for path in self.after)

    def tags(self, after: Paths) -> Paths:
        """Any of the tags, followed by `after`."""
        found: list[Path] = []
        for index, tag in enumerate(self.items("tags")):
            place = f"{self.place}.tags[{index}]"
            if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
                raise _invalid(place, "must be an object of type tag")
            found += self.formats.paths({**tag, "type": "tag"}, place, self.ends, after, self.depth)
        return tuple(found)


def _const_string(part: _Part) -> Paths:
    return literal(part.string("value"), part.after)


def _regex(part: _Part) -> Paths:
    pattern = part.string("pattern")
    if not pattern:
        return part.after
    name = part.grammar.new_name("T")
    part.grammar.define(name, f"/{regex_to_lark(pattern, '')}/", f"{part.place}.pattern")
    return before(name, "", part.after)


def _any_text(part: _Part) -> Paths:
    part.refuse("max_tokens")
    max_chars = None if part.given.get("max_chars") is None else part.number("max_chars", 0, MAX_TEXT_CHARS)
    excluded = [*part.ends, *part.strings("excludes"), *part.endings()]
    return before(part.grammar.text(excluded, max_chars), "", part.after)


def _json_schema(part: _Part) -> Paths:
    part.refuse("style", "json")
    part.refuse("any_order", False)
    part.refuse("excludes", [])
    if part.given.get("max_whitespace_cnt") is not None:
        part.number("max_whitespace_cnt", 1, MAX_TEXT_CHARS)  # one space is the most in any case
    schema = part.given.get("json_schema")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _invalid(
            f"{part.place}.json_schema", "must be a JSON schema, for which there is a value: an object, or true"
        )
    if (negative := negative_multiple(schema)) is not None:
        raise _invalid(f"{part.place}.json_schema{negative.place}", negative.reason)
    body = json.dumps({**bounded_schema(schema), "x-guidance": _SPACING}, separators=(",", ":"))
    return _rule(part, "json", f"%json {body}", "json_schema")


def _grammar(part: _Part) -> Paths:
    source = part.given.get("grammar")
    if not isinstance(source, str) or not source.strip():
        raise _invalid(f"{part.place}.grammar", "must be a grammar in Lark's notation or in GBNF")
    try:
        own = json.loads(grammars.lark_grammar(source))["grammars"][0]
    except InvalidParameter as error:
        raise _invalid(f"{part.place}.grammar", error.message) from None
    name = part.grammar.new_name("g")
    part.grammar.others.append({**own, "name": name})
    return _rule(part, "grammar", f"@{name}", "grammar")


def _rule(part: _Part, prefix: str, body: str, field: str) -> Paths:
    """A part that is no regular expression."""
    name = part.grammar.new_name(f"{prefix}_")
    part.grammar.define(name, body, f"{part.place}.{field}")
    return (Path(tail=f"{name} {part.grammar.follow(part.after)}".strip()),)


def _sequence(part: _Part) -> Paths:
    after = part.after
    for index, element in reversed(list(enumerate(part.items("elements")))):
        after = part.formats.paths(element, f"{part.place}.elements[{index}]", part.ends, after, part.depth)
    return after


def _or(part: _Part) -> Paths:
    elements = part.items("elements")
    after = part.after
    if len(elements) * len(after) > _MAX_PATHS:
        after = (Path(tail=part.grammar.follow(after)),)
    found: list[Path] = []
    for index, element in enumerate(elements):
        found += part.formats.paths(element, f"{part.place}.elements[{index}]", part.ends, after, part.depth)
    return tuple(found)


def _optional(part: _Part) -> Paths:
    return (*part.inner("content", part.after), *part.after)


def _repeated(part: _Part, least: int, most: int | None) -> Paths:
    """The content `least` to `most` times."""
    times = f"{{{least},{'' if most is None else most}}}"
    if most == 0:
        return part.after
    if _is_regular(part.given.get("content")) and not any(path.tail for path in part.after):
        content = part.inner("content", (Path(),))
        return before(part.grammar.terminal(f"({expression(content)}){times}"), "", part.after)
    grammar, name = part.grammar, part.grammar.new_name("r")
    ended = grammar.new_name("r")
    grammar.define(ended, '""')
    grammar.define(name, grammar.alternatives(part.inner("content", (Path(tail=ended),))))
    return (Path(tail=f"{name}{times} {grammar.follow(part.after)}".strip()),)


def _repeat(part: _Part) -> Paths:
    least = part.number("min", 0, MAX_REPEATS)
    most = None if part.given.get("max") == -1 else part.number("max", least, MAX_REPEATS)
    return _repeated(part, least, most)


def _tag(part: _Part) -> Paths:
    for name in ("begin", "end"):
        if isinstance(part.given.get(name), dict):
            raise Unsupported(f"{part.place}.{name}: only a text is supported", param=f"{part.place}.{name}")
    given = part.given.get("end")
    ends = dict.fromkeys(part.strings("end") if given and isinstance(given, list) else [part.string("end")])
    after = tuple(path for end in ends for path in literal(end, part.after))
    return literal(part.string("begin"), part.inner("content", after, tuple(filter(None, ends))))


def _triggered_tags(part: _Part) -> Paths:
    """Free text up to a trigger, which begins a tag, and so on."""
    triggers = part.strings("triggers")
    for index, tag in enumerate(part.items("tags")):
        begin = tag.get("begin") if isinstance(tag, dict) else None
        if isinstance(begin, str) and sum(begin.startswith(trigger) for trigger in triggers) != 1:
            raise _invalid(
                f"{part.place}.tags[{index}].begin", "must begin with one of the triggers, and with one only"
            )
    goes_on, grammar = not part.flag("stop_after_first"), part.grammar
    name = grammar.new_name("r")
    tags = part.tags((Path(tail=name),) if goes_on else part.after)
    is_first, excludes = part.flag("at_least_one"), part.strings("excludes")
    if is_first and not goes_on:
        return tags
    text = grammar.text([*triggers, *part.ends, *excludes, *part.endings()])
    texts = (*before(text, "", tags), *before(text, "", part.after))
    if not goes_on:
        return texts
    grammar.define(name, grammar.alternatives(texts))
    return tags if is_first else (Path(tail=name),)


def _tags_with_separator(part: _Part) -> Paths:
    separator, grammar = part.string("separator"), part.grammar
    none = () if part.flag("at_least_one") else part.after
    if part.flag("stop_after_first"):
        return (*part.tags(part.after), *none)
    name = grammar.new_name("r")
    tags = part.tags((Path(tail=name),))
    grammar.define(name, grammar.alternatives((*literal(separator, tags), *part.after)))
    return (*tags, *none)


_KINDS: Final[Mapping[str, Callable[[_Part], Paths]]] = {
    "const_string": _const_string,
    "json_schema": _json_schema,
    "regex": _regex,
    "grammar": _grammar,
    "any_text": _any_text,
    "sequence": _sequence,
    "or": _or,
    "optional": _optional,
    "star": lambda part: _repeated(part, 0, None),
    "plus": lambda part: _repeated(part, 1, None),
    "repeat": _repeat,
    "tag": _tag,
    "triggered_tags": _triggered_tags,
    "tags_with_separator": _tags_with_separator,
}


def _is_regular(given: object) -> bool:
    """Whether a format and all within it become one regular expression."""
    if not isinstance(given, dict):
        return True  # an error in any case
    if given.get("type") in ("json_schema", "grammar", "triggered_tags", "tags_with_separator"):
        return False
    elements = given.get("elements")
    return all(map(_is_regular, [given.get("content"), *(elements if isinstance(elements, list) else [])]))


def _invalid(param: str, reason: str) -> InvalidParameter:
    return InvalidParameter(f"{param}: {reason}", param=param)
