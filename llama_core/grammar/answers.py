"""The grammar of a whole answer: reasoning, and then calls of tools, what structured output asks for, or text."""

from dataclasses import replace

from llguidance import LLMatcher

from llama_core.errors import InvalidParameter
from llama_core.grammar.build import joined, schema_of
from llama_core.grammar.check import MAX_BYTES, byte_vocabulary, checked, in_background, limits
from llama_core.grammar.tool_schemas import usable_tools
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.tools.json_scan import MAX_SPACES, SPACES
from llama_core.text.tools.lark import SPACE, MarkIds, pattern
from llama_core.text.tools.tool import Call, ToolUse
from llama_core.text.tools.tool_format import ToolFormat


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
        raise InvalidParameter(f"{param}: must make a grammar of at most {MAX_BYTES} bytes", param=param)
    return grammar


def _joined(form: AnswerFormat, marks: MarkIds, use: ToolUse | None, wanted: str, begun: bool | None) -> str:
    lines = ['start: " "? whole' if form.is_spaced else "start: whole", *_reasoning(form, marks, begun)]
    lines += ["answer: @wanted"] if use is None else _calls(form.tool_format, marks, use, bool(wanted))
    source = "\n".join([*lines, "TEXT: /(?s:.+)/"])
    return joined(source, {"wanted": wanted} if wanted else {})


def _reasoning(form: AnswerFormat, marks: MarkIds, begun: bool | None) -> list[str]:
    if begun is None or form.reasoning is None:
        return ["whole: answer"]
    opening, closing = form.reasoning.opening, form.reasoning.closing
    # Models write a blank line between their reasoning and the answer.
    after = f"thought /{SPACE}{{0,4}}/ answer"
    whole = f"whole: {after}" if begun else f"whole: answer | {marks.lark(opening)} {after}"
    if marks.is_control(closing):
        return [whole, f"thought: TEXT? {marks.lark(closing)}"]
    return [whole, f"thought[lazy]: /(?s:.*){pattern(closing)}/"]


def _calls(tool_format: ToolFormat, marks: MarkIds, use: ToolUse, has_wanted: bool) -> list[str]:
    rules = tool_format.rules(use, marks)
    more = f" following{{0,{use.max_calls - 1}}}" if use.max_calls > 1 else ""
    lines = [f"following: {rules.following}"] if more else []
    if use.mode == "required":
        lines.append(f"answer: required{more} {rules.end}".rstrip() + (" | @wanted" if has_wanted else ""))
        lines.append(f"required: {rules.first}")
    else:
        lines.append(f"answer: | TEXT | triggered{more} {rules.end}".rstrip())
        lines.append(f"triggered: {' | '.join(rules.triggered)}")
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
            raise InvalidParameter(
                f"{param}: this model writes calls as JSON objects, so beside tools the schema must have additionalProperties "
                "false, no patternProperties, and not the properties name and parameters together",
                param=param,
            )
        return
    if not openings.isdisjoint(in_background(lambda: _first_chars(wanted))):
        raise InvalidParameter(
            f"{param}: beside tools that the model may call, it must be a JSON schema of type object, or allow no answer that "
            f"begins as calls do, with {' or '.join(map(repr, sorted(openings)))}",
            param=param,
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
