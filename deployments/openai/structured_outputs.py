"""Structured output: OpenAI's `response_format` and vLLM's `structured_outputs`, as one grammar."""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from llguidance import StructTag

from deployments.openai.unsupported import ANY, REASONS, Neutral, refuse_unsupported
from llama_core.errors import InvalidParameter
from llama_core.grammar import build
from llama_core.grammar.check import MAX_BYTES
from llama_core.grammar.closed_objects import MOST_READ, closed_objects

if TYPE_CHECKING:
    from deployments.openai.schemas import GenerationBody

MAX_CHOICES: Final = 1024
MAX_STRUCTURES: Final = 128
# Fields that a `response_format` of each type may have.
_FORMATS: Final = {
    "text": {"type"},
    "json_object": {"type", "schema"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "structures", "triggers", "format"},
}
# vLLM's options beside the kinds. There is one backend, without another to fall back to.
_OPTIONS: Final[Neutral] = {
    "backend": ANY, "disable_fallback": ANY, "disable_any_whitespace": (False,),
    "disable_additional_properties": ANY, "whitespace_pattern": (),
}  # fmt: skip
_WHITE_SPACE: Final = REASONS["guided_whitespace_pattern"]
_OPTION_REASONS: Final = {"disable_any_whitespace": _WHITE_SPACE, "whitespace_pattern": _WHITE_SPACE}


def grammar_of(body: "GenerationBody") -> tuple[str, str]:
    """The grammar that the body asks for, unchecked, and the name of the field; two empty texts where it asks for none.

    Raises InvalidParameter that names the field.
    """
    wanted: list[tuple[str, str, Any]] = []  # field, kind, value
    if body.structured_outputs:
        refuse_unsupported(body.structured_outputs, _OPTIONS, "structured_outputs.", _OPTION_REASONS)
        wanted += [(f"structured_outputs.{kind}", kind, value) for kind, value in _kinds(body.structured_outputs)]
    if body.response_format is not None and (of_format := _of_response_format(body.response_format)) is not None:
        wanted.append(("response_format", *of_format))
    if len(wanted) > 1:
        names = " and ".join(name for name, *_ in wanted)
        raise InvalidParameter.of(wanted[1][0], f"{names} exclude each other")
    return (_written(*wanted[0]), wanted[0][0]) if wanted else ("", "")


def _written(param: str, kind: str, value: Any) -> str:
    try:
        return _WRITE[kind](value)
    except InvalidParameter as error:
        raise InvalidParameter.of(param, error.message) from None


def _kinds(given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What `structured_outputs` asks for."""
    if not given.keys() <= {*_WRITE, *_OPTIONS}:
        raise InvalidParameter.of(
            "structured_outputs", f"each name in it must be one of {', '.join((*_WRITE, *_OPTIONS))}"
        )
    is_asked = {name: value is not None and (name, value) != ("json_object", False) for name, value in given.items()}
    return [(name, value) for name, value in given.items() if name in _WRITE and is_asked[name]]


def _of_response_format(given: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The kind and its value; None for plain text."""
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise InvalidParameter.of("response_format", f"type must be one of {', '.join(_FORMATS)}")
    for name in ("json_schema", "schema"):
        if given.get(name) and name not in _FORMATS[kind]:
            param = f"response_format.{name}"
            place = "a schema belongs to the type json_schema, in response_format.json_schema.schema"
            raise InvalidParameter.of(param, place)
    if kind == "json_schema":
        wrapped = given.get("json_schema")
        if not isinstance(wrapped, dict) or not isinstance(wrapped.get("schema"), dict | bool):
            raise InvalidParameter.of("response_format.json_schema.schema", "is required, and must be a JSON schema")
        return "json", wrapped["schema"]
    if kind == "json_object" and isinstance(given.get("schema"), dict):  # llama.cpp's form
        return "json", {"type": "object"} | given["schema"]
    return None if kind == "text" else (kind, given)


def _parsed(value: Any) -> Any:
    """The value of a text, which is parsed on the event loop; another value as it is."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_BYTES:
        raise InvalidParameter(f"must have at most {MAX_BYTES} bytes")
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidParameter("the text is not JSON") from None


def _json_schema(value: Any) -> str:
    value = _parsed(value)
    if not isinstance(value, dict | bool):
        raise InvalidParameter("must be a JSON schema, an object or its text")
    return build.json_schema_grammar(value)


def _regex(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameter("must be a regular expression")
    return build.regex_grammar(value)


def _choice(value: Any) -> str:
    is_listed = isinstance(value, list) and 1 <= len(value) <= MAX_CHOICES
    if not is_listed or not all(isinstance(choice, str) and choice for choice in value):
        raise InvalidParameter(f"must be a list of 1 to {MAX_CHOICES} strings that are not empty")
    return build.choice_grammar(value)


def _grammar(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidParameter("must be a grammar in Lark's notation or in GBNF")
    return build.lark_grammar(value)


def _structural_tag(value: Any) -> str:
    """Free text in which what begins with a trigger goes on as a structure says."""
    value = _parsed(value)
    given = value if isinstance(value, dict) else {}
    if given.get("format") is not None:
        raise InvalidParameter("the form with format is not supported: send structures and triggers")
    structures, triggers = given.get("structures") or [], given.get("triggers") or []
    are_lists = isinstance(structures, list) and isinstance(triggers, list) and 1 <= len(structures) <= MAX_STRUCTURES
    if not are_lists or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise InvalidParameter(f"must have triggers, a list of strings, and 1 to {MAX_STRUCTURES} structures")
    if len(json.dumps(structures)) > MAX_BYTES:
        raise InvalidParameter(f"must make a grammar of at most {MAX_BYTES} bytes")
    tags = []
    for each in structures:
        begin, schema, end = (each.get(name) if isinstance(each, dict) else None for name in ("begin", "schema", "end"))
        if not isinstance(begin, str) or not isinstance(schema or {}, dict) or not isinstance(end, str):
            raise InvalidParameter("each structure must have begin, schema and end")
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidParameter("each begin must begin with one of the triggers")
        grammar = {**closed_objects(schema or {}, MOST_READ // len(structures)), "x-guidance": build.JSON_OPTIONS}
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=grammar, end=end))
    return build.joined(StructTag.to_grammar(tags, assume_special=False), {})


_WRITE: Final[Mapping[str, Callable[[Any], str]]] = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": lambda _: build.json_object_grammar(),
    "structural_tag": _structural_tag,
}
