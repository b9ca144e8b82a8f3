"""The grammar of a whole answer: reasoning, and then calls of tools, what structured output asks for, or text.

A schema of a tool that the grammar cannot follow refuses no other tool.
"""

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from llguidance import LLMatcher

from llama_core.errors import InvalidParameter
from llama_core.grammar.build import joined, schema_of
from llama_core.grammar.check import MAX_BYTES, byte_vocabulary, checked, in_background, limits
from llama_core.grammar.closed_objects import closed_objects
from llama_core.grammar.shared_cache import SharedCache
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.reasoning import Marks
from llama_core.text.tools.json_scan import MAX_SPACES, SPACES
from llama_core.text.tools.lark import SPACE, MarkIds, pattern, schema_item
from llama_core.text.tools.tool import Call, Tool, ToolUse
from llama_core.text.tools.tool_format import ToolFormat

log = logging.getLogger(__name__)

_FOLLOWED: Final = SharedCache[str](2**24)  # by scope: clients send the same tools with every request
_ANY_OBJECT: Final = '{"type": "object"}'
_PLACE_CHARS: Final = 200


def answer_grammar(
    form: AnswerFormat,
    wanted: str,
    param: str,
    use: ToolUse | None = None,
    *,
    begun: bool | None = None,
    scope: str = "",
) -> str:
    """The checked grammar of an answer; "" where it may be any text. Takes processor time: 2 ms for most, up to 0.5 s.

    wanted: the grammar that the field `param` asks for, or "". use: the tools that the answer may call, instead of what is
    wanted. begun: whether the answer begins within its reasoning; None: it has none. scope: as `checked` has it.

    Raises InvalidParameter that names `param`, a tool or "tools".
    """
    if wanted:
        wanted = checked(wanted, param, scope)
    if use is not None and use.mode == "required":
        wanted = ""
    if use is not None:
        if wanted:
            _check_beside_calls(wanted, form.tool_format, param)
            use = replace(use, mode="required")
        use = usable_tools(use, scope)
        # Where control tokens are characters, which the check's vocabulary has.
        checked(_joined(form, MarkIds(), use, wanted, begun), "tools", scope)
    elif not wanted:
        return ""
    is_plain = use is None and begun is None and not form.is_spaced
    grammar = wanted if is_plain else _joined(form, form.mark_ids, use, wanted, begun)
    if len(grammar.encode()) > MAX_BYTES:
        param = "tools" if use is not None else param
        raise InvalidParameter.of(param, f"must make a grammar of at most {MAX_BYTES} bytes")
    return grammar


def _joined(form: AnswerFormat, marks: MarkIds, use: ToolUse | None, wanted: str, begun: bool | None) -> str:
    around = None if begun is None else form.marks
    lines = ['start: " "? whole' if form.is_spaced else "start: whole", *_reasoning(around, marks, bool(begun))]
    opening = f"{marks.lark(around.answer)} " if around is not None and around.answer else ""
    aside = f"{marks.lark(around.aside)} thought next" if around is not None and around.aside else ""
    lines += [f"answer: {opening}@wanted"] if use is None else _calls(form, marks, use, bool(wanted), opening, aside)
    source = "\n".join([*lines, "TEXT: /(?s:.+)/"])
    return joined(source, {"wanted": wanted} if wanted else {})


def _reasoning(around: Marks | None, marks: MarkIds, begun: bool) -> list[str]:
    """The rule `thought` is the reasoning with its end, `next` what follows."""
    if around is None:
        return ["whole: answer"]
    opening = marks.lark(around.open)
    if around.further:
        lines = [f"whole: {'thought next' if begun else 'message'}", f"next: {marks.lark(around.further)} message"]
        lines.append(f"message: answer | {opening} thought next")
    else:
        # Models write a blank line between their reasoning and the answer.
        after = f"thought /{SPACE}{{0,4}}/ answer"
        lines = [f"whole: {after}" if begun else f"whole: answer | {opening} {after}"]
    if marks.is_control(around.close):
        return [*lines, f"thought: TEXT? {marks.lark(around.close)}"]
    return [*lines, f"thought[lazy]: /(?s:.*){pattern(around.close)}/"]


def _calls(form: AnswerFormat, marks: MarkIds, use: ToolUse, has_wanted: bool, opening: str, aside: str) -> list[str]:
    """opening, aside: what opens an answer in messages, and a text before it; "" for an answer of another form."""
    rules = form.tool_format.rules(use, marks)
    more = f" following{{0,{use.max_calls - 1}}}" if use.max_calls > 1 else ""
    lines = [f"following: {rules.following}"] if more else []
    called = f"{more} {rules.end}".rstrip()
    if use.mode == "required" or opening:
        lines.append(f"required: {rules.first}")
    if use.mode == "required":
        lines.append(f"answer: required{called}" + (f" | {opening}@wanted" if has_wanted else ""))
        return [*lines, *rules.definitions]
    lines.append(f"triggered: {' | '.join(rules.triggered)}")
    lines.append(f"answer: | {opening}TEXT | {opening}triggered{called}")
    if opening:
        lines[-1] += f" | required{called} | {aside}"
    return [*lines, *rules.definitions]


def _check_beside_calls(wanted: str, tool_format: ToolFormat, param: str) -> None:
    """Raises InvalidParameter unless the first words of an answer tell whether it is a call.

    The matcher divides text into the longest words that any alternative allows. So no answer may begin with the character with
    which calls begin, or both are objects and the keys of the answer are known.
    """
    openings = {tool_format.written_calls([Call("f", "{}")])[0], *(mark[0] for mark in tool_format.marks)}
    schema = schema_of(wanted)
    if isinstance(schema, dict) and schema.get("type") == "object":
        composed = any(name in schema for name in ("allOf", "anyOf", "oneOf", "$ref", "patternProperties"))
        names = schema.get("properties", {}).keys()
        if "{" in openings and (
            composed or schema.get("additionalProperties") is not False or {"name", "parameters"} <= names
        ):
            raise InvalidParameter.of(
                param,
                "this model writes calls as JSON objects, so beside tools the schema must have additionalProperties "
                "false, no patternProperties, and not the properties name and parameters together",
            )
        return
    if not openings.isdisjoint(in_background(lambda: _first_chars(wanted))):
        raise InvalidParameter.of(
            param,
            f"beside tools that the model may call, it must be a JSON schema of type object, or allow no answer that "
            f"begins as calls do, with {' or '.join(map(repr, sorted(openings)))}",
        )


def _first_chars(grammar: str) -> set[str]:
    """The first bytes of the grammar's texts after white space, as characters."""
    found: set[str] = set()
    matchers = [LLMatcher(byte_vocabulary(), grammar, log_level=0, limits=limits())]
    for _ in range(MAX_SPACES + 1):
        allowed = [{chr(byte) for byte, bias in enumerate(each.compute_logit_bias()) if bias} for each in matchers]
        found.update(*allowed)
        # One matcher for each last character: what may follow white space seldom depends on more of it.
        after = {
            space: each.deep_copy()
            for each, chars in zip(matchers, allowed, strict=True)
            for space in chars & set(SPACES)
        }
        matchers = list(after.values())
        for space, each in after.items():
            each.consume_token(ord(space))
    return found - set(SPACES)


def usable_tools(use: ToolUse, scope: str) -> ToolUse:
    """The tools with closed objects. A schema that cannot be followed becomes any object; where its tool is strict or a call
    is required, raises InvalidParameter that says where in the schema the fault is."""
    tools = []
    for index, tool in enumerate(use.tools):
        place, must = tool.place or f"tools[{index}].function.parameters", tool.strict or use.mode == "required"
        make = partial(_followed, replace(tool, place=place), must, scope)
        key = tool.schema, tool.strict, must
        tools.append(replace(tool, schema=_FOLLOWED.find_or_make(scope, key, make)))
    return replace(use, tools=tuple(tools))


def _followed(tool: Tool, must: bool, scope: str) -> str:
    schema = json.loads(tool.schema)
    followed = closed_objects(schema)
    if not (fault := _fault(followed, tool, scope)):
        return json.dumps(followed)
    if not must:
        log.warning("the arguments of tool %s may be any object: %s", tool.name, fault)
        return _ANY_OBJECT
    place = re.sub(r"[^\w.$-]", "?", _place(schema, fault, tool, scope))[-_PLACE_CHARS:]
    remedy = ", or set strict to false" if tool.strict else ""
    raise InvalidParameter.of(tool.place, f"{fault}{place and ', at '}{place}: change it{remedy}")


def _fault(schema: Any, tool: Tool, scope: str) -> str:
    """Why the schema cannot be followed, or ""."""
    try:
        checked(joined(f"start: {schema_item(schema, is_strict=tool.strict)}", {}), "", scope)
    except InvalidParameter as error:
        return error.message.removeprefix(": ")
    return ""


def _place(schema: dict[str, Any], fault: str, tool: Tool, scope: str) -> str:
    """Of the innermost part of the schema that has the fault alone; "" where none has."""
    parts = list(_parts(schema, ""))
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

    def fault_of(begin: int, end: int) -> str:
        properties = {str(index): part for index, (_, part) in enumerate(parts[begin:end])}
        return _fault({**definitions, "type": "object", "properties": properties}, tool, scope)

    at = bisect_left(range(len(parts)), True, key=lambda index: bool(fault_of(0, index + 1)))
    return parts[at][0] if at < len(parts) and fault_of(at, at + 1) == fault else ""


def _parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """All objects within the value with their places; inner ones come first."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        inner = (f"{place}.{key}" if place else str(key))[-_PLACE_CHARS:]  # a long key would be in many places
        yield from _parts(each, inner)
        if isinstance(each, dict):
            yield inner, each
