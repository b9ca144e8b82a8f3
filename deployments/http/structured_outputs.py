"""Structured output: the fields by which clients ask for JSON, a pattern, a choice or a grammar, as one grammar.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`, llama.cpp's `grammar` and `json_schema`,
SGLang's `regex` and `ebnf`.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from llguidance import StructTag

from deployments.http.structural_tag import parsed, refused_part, structural_tag_grammar
from deployments.http.unsupported import REASONS, Neutral, any_value, equals, no_value, refuse_unsupported
from llama_core.errors import InvalidParameter
from llama_core.scheduling.sampling_params import MAX_GRAMMAR_BYTES
from llama_core.text import grammar as grammars
from llama_core.text.gbnf import is_gbnf
from llama_core.text.schema_faults import negative_multiple
from llama_core.text.schema_numbers import bounded_schema

if TYPE_CHECKING:
    from deployments.http.schemas import GenerationBody

MAX_CHOICES: Final = 1024
MAX_STRUCTURES: Final = 128
_SCHEMA_PLACES: Final = {"response_format": "response_format.json_schema.schema"}  # where it is not the field itself
# By type of `response_format`, the fields that may have its schema: OpenAI's, llama.cpp's, and text-generation-inference's.
_SCHEMAS_OF_TYPE: Final = {"text": (), "json_object": ("schema", "value"), "json_schema": ("json_schema", "schema")}
# What a schema without OpenAI's object around it has, and what only that object has.
_SCHEMA_WORDS: Final = frozenset(("$ref", "allOf", "anyOf", "const", "enum", "items", "oneOf", "properties", "type"))
_WRAPPER_WORDS: Final = frozenset(("name", "schema", "strict"))
_GBNF: Final = '{"gbnf": '  # how a grammar begins that is converted in the thread that checks it
_STRUCTURAL_TAGS: Final = ("response_format", "structured_outputs.structural_tag")
_LARK_PLACE: Final = re.compile(r"line \d+, column \d+: ")  # of the grammar that is made of the structures
# Of `StructTag`: the rule of a structure up to its schema. Texts in it are JSON, without line breaks.
_STRUCTURE: Final = re.compile(r'^tag_(\d+): tag_\1_trig (?:"(?:\\.|[^"\\])*")? %json ', re.MULTILINE)
# Fields of a body that name what the answer must be, and how it is written in `structured_outputs`.
_KIND_OF_FIELD: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
_FIELDS: Final = frozenset((*_KIND_OF_FIELD, "structured_outputs", "response_format"))

_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# vLLM's options beside the kinds. There is one backend, without another to fall back to.
_OPTIONS: Final[Neutral] = {
    "backend": any_value, "disable_fallback": any_value, "disable_any_whitespace": equals(False),
    "disable_additional_properties": equals(False), "whitespace_pattern": no_value,
}  # fmt: skip
_WHITE_SPACE: Final = REASONS["guided_whitespace_pattern"]
_OPTION_REASONS: Final = {
    "disable_any_whitespace": _WHITE_SPACE,
    "whitespace_pattern": _WHITE_SPACE,
    "disable_additional_properties": "the schema says it, with additionalProperties false",
}


def grammar_of(body: "GenerationBody") -> tuple[str, str]:
    """The grammar that the body asks for, unchecked, and the name of the field; two empty texts where it asks for none.

    Raises InvalidParameter that names the field.
    """
    if body.model_fields_set.isdisjoint(_FIELDS):
        return "", ""
    found: list[tuple[str, str]] = []
    for name, kind in _KIND_OF_FIELD.items():
        if (value := getattr(body, name)) is not None and value != "":
            found.append((_of_kind(kind, value, name), name))
    if body.structured_outputs:
        found += _of_structured_outputs(body.structured_outputs)
    if body.response_format is not None and (of_format := _of_response_format(body.response_format))[0]:
        found.append(of_format)
    if (
        len({grammar for grammar, _ in found}) > 1
    ):  # an older name may have its successor beside it, with the same value
        names = " and ".join(name for _, name in found)
        raise InvalidParameter(f"{found[1][1]}: {names} exclude each other", param=found[1][1])
    return found[-1] if found else ("", "")


@grammars.kept
def checked(by: grammars.Checks, grammar: str, param: str, *, is_whole: bool = True) -> str:
    """`grammar.checked_grammar`, kept for requests with the same one. Takes up to 0.1 s the first time, GBNF up to a second."""
    if grammar.startswith(_GBNF):
        grammar = _of_gbnf(by, json.loads(grammar)["gbnf"], param)
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidParameter(f"{param}: must have at most {MAX_GRAMMAR_BYTES} bytes", param=param)
    try:
        return by.checked_grammar(grammar, param, _SCHEMA_PLACES.get(param, ""), is_whole=is_whole)
    except InvalidParameter as error:
        if (part := refused_part(by, grammar, param)) is not None:
            raise part from None
        source = json.loads(grammar)["grammars"][0].get("lark_grammar") if param in _STRUCTURAL_TAGS else None
        if source is None:
            raise
        refusal = error
    raise _refused_structure(source, param) or InvalidParameter(_LARK_PLACE.sub("", refusal.message), param=param)


def _of_response_format(given: Mapping[str, Any]) -> tuple[str, str]:
    """The grammar and the field's name; an empty grammar for plain text."""
    kind = given.get("type")
    if kind == "structural_tag":
        return _structural_tags(given, "response_format"), "response_format"
    if not isinstance(kind, str) or kind not in _SCHEMAS_OF_TYPE:
        raise InvalidParameter(
            "response_format: type must be text, json_object, json_schema or structural_tag", param="response_format"
        )
    neutral: tuple[object, ...] = (None, {}) if kind == "text" else (None,)
    schemas = {name: given[name] for name in ("json_schema", "schema", "value") if given.get(name) not in neutral}
    for name in schemas:
        if name not in _SCHEMAS_OF_TYPE[kind]:
            param = f"response_format.{name}"
            raise InvalidParameter(f"{param}: is not a field of this type of response_format", param=param)
    if len(schemas) > 1:
        first, second = (f"response_format.{name}" for name in list(schemas)[:2])
        raise InvalidParameter(f"{second}: {first} and {second} exclude each other", param=second)
    name, schema = next(iter(schemas.items()), ("", None))
    if name == "json_schema":
        return _of_wrapped_schema(schema)
    if name and not (kind == "json_object" and schema == {}):
        return _json_schema(schema, f"response_format.{name}"), f"response_format.{name}"
    if kind == "json_schema":
        raise InvalidParameter("response_format: json_schema must have a schema", param="response_format")
    return ("" if kind == "text" else grammars.json_object_grammar()), "response_format"


def _of_wrapped_schema(given: Any) -> tuple[str, str]:
    """The grammar and the name of the field `json_schema`: OpenAI's object {name, schema}, or a bare schema in its place."""
    if not isinstance(given, dict):
        raise InvalidParameter(
            "response_format.json_schema: must be an object with a schema", param="response_format.json_schema"
        )
    if (schema := given.get("schema")) is not None:
        place = _SCHEMA_PLACES["response_format"]
        if not isinstance(schema, dict | bool):
            raise InvalidParameter(f"{place}: must be a JSON schema, an object", param=place)
        return _of_schema(schema, place), "response_format"
    is_schema = not _SCHEMA_WORDS.isdisjoint(given) and _WRAPPER_WORDS.isdisjoint(given)
    if not is_schema:
        place = _SCHEMA_PLACES["response_format"]
        raise InvalidParameter(f"{place}: is required, and must be a JSON schema", param=place)
    return _of_schema(given, "response_format.json_schema"), "response_format.json_schema"


def _of_structured_outputs(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    refuse_unsupported(given, _OPTIONS, "structured_outputs.", _OPTION_REASONS)
    found = []
    for name, value in given.items():
        if name in _KINDS:
            if value is not None and not (name == "json_object" and value is False):  # the schema false is no absence
                param = f"structured_outputs.{name}"
                found.append((_of_kind(name, value, param), param))
        elif name not in _OPTIONS:
            raise InvalidParameter(
                f"structured_outputs: each name in it must be one of {', '.join((*_KINDS, *_OPTIONS))}",
                param="structured_outputs",
            )
    return found


def _of_kind(kind: str, value: Any, param: str) -> str:
    write: Callable[[Any, str], str] = {
        "json": _json_schema,
        "regex": _regex,
        "choice": _choice,
        "grammar": _grammar,
        "json_object": lambda *_: grammars.json_object_grammar(),
        "structural_tag": _structural_tags,
    }[kind]
    try:
        return write(value, param)
    except InvalidParameter as error:  # of a builder, which does not know the field
        if error.param:
            raise
        raise InvalidParameter(f"{param}: {error.message}", param=param) from None


def _json_schema(value: Any, param: str) -> str:
    if isinstance(value, str):
        if len(value) > MAX_GRAMMAR_BYTES:  # parsed on the event loop
            raise InvalidParameter(f"{param}: must have at most {MAX_GRAMMAR_BYTES} bytes", param=param)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidParameter(f"{param}: the text is not JSON", param=param) from None
    if not isinstance(value, dict | bool):
        raise InvalidParameter(f"{param}: must be a JSON schema, an object or its text", param=param)
    return _of_schema(value, param)


def _of_schema(schema: Mapping[str, Any] | bool, param: str) -> str:
    try:
        return grammars.json_schema_grammar(schema)
    except InvalidParameter as error:
        param += error.param or ""
        raise InvalidParameter(f"{param}: {error.message}", param=param) from None


def _regex(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameter(f"{param}: must be a regular expression", param=param)
    return grammars.regex_grammar(value)


def _choice(value: Any, param: str) -> str:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidParameter(f"{param}: must be a list of 1 to {MAX_CHOICES} strings", param=param)
    if not all(isinstance(choice, str) and choice for choice in value):
        raise InvalidParameter(f"{param}: each choice must be a string that is not empty", param=param)
    for i, choice in enumerate(value):
        if not choice.isascii() and choice.encode(errors="replace").decode() != choice:  # only by Serve handle
            raise InvalidParameter(f"{param}[{i}]: must have no lone surrogates", param=f"{param}[{i}]")
    return grammars.choice_grammar(value)


def _grammar(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidParameter(f"{param}: must be a grammar in Lark's notation or in GBNF", param=param)
    if len(value) > MAX_GRAMMAR_BYTES:  # before it is read
        raise InvalidParameter(f"{param}: must have at most {MAX_GRAMMAR_BYTES} bytes", param=param)
    return json.dumps({"gbnf": value}) if is_gbnf(value) else grammars.lark_grammar(value)


def _of_gbnf(by: grammars.Checks, source: str, param: str) -> str:
    try:
        return by.lark_grammar(source)
    except InvalidParameter as error:
        raise InvalidParameter(f"{param}: {error.message}", param=param) from None


def _structural_tags(value: Any, param: str) -> str:
    """vLLM's object or its text: a `format`, or in the older form texts that, behind a trigger, go on as a structure says."""
    value = parsed(value, param)
    if isinstance(value, dict) and value.get("format") is not None:
        return structural_tag_grammar(value["format"], param)
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    is_listed = isinstance(structures, list) and isinstance(triggers, list) and 1 <= len(structures) <= MAX_STRUCTURES
    if not is_listed or not all(isinstance(trigger, str) and trigger for trigger in triggers or ()):
        raise InvalidParameter(
            f"{param}: must have a format, or triggers, a list of strings, and 1 to {MAX_STRUCTURES} structures",
            param=param,
        )
    tags = []
    for index, structure in enumerate(structures or ()):
        begin, end = (structure.get(name) if isinstance(structure, dict) else None for name in ("begin", "end"))
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(structure.get("schema", {}), dict):
            raise InvalidParameter(f"{param}: each structure must have begin, schema and end", param=param)
        trigger = next((trigger for trigger in triggers or () if begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidParameter(f"{param}: each begin must begin with one of the triggers", param=param)
        schema = bounded_schema(given := structure.get("schema", {}))
        if (negative := negative_multiple(given)) is not None:
            place = f"{param}.structures[{index}].schema{negative.place}"
            raise InvalidParameter(f"{place}: {negative.reason}", param=place)
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return grammars.lark_grammar(StructTag.to_grammar(tags, assume_special=False))


def _refused_structure(source: str, param: str) -> InvalidParameter | None:
    """What is wrong with the first structure whose schema is refused. source: of `StructTag`."""
    for found in _STRUCTURE.finditer(source):
        schema, _ = json.JSONDecoder().raw_decode(source, found.end())
        try:
            grammars.check_schema(schema, f"{param}.structures[{found[1]}].schema")
        except InvalidParameter as error:
            return error
    return None
