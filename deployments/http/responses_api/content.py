"""The parts of bodies of OpenAI's responses: input items, tools, and what the answer may be.

Unknown fields are ignored and null means absent, as in `deployments/openai/schemas.py`.
"""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag, model_validator

from deployments.openai.errors import Unsupported
from deployments.openai.field_types import MAX_MESSAGES, Body, Flag, joined_texts, only_text, with_earlier_as_text
from deployments.openai.tool_fields import MAX_ARGUMENT_CHARS, MAX_ID_CHARS, MAX_TOOLS, only_offered
from deployments.openai.translation import kind_of
from deployments.openai.unsupported import CheckedBody, Neutral
from deployments.openai.validation import KIND_MARK
from llama_core.errors import InvalidParameter

_TEXT_PARTS = ("input_text", "output_text", "refusal", "text", "summary_text", "reasoning_text")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
# Ends of the types of items of tools that this server does not run: web_search_call, custom_tool_call_output.
_OTHER_TOOLS = ("_call", "_call_output", "mcp_list_tools", "_approval_request", "_approval_response", "compaction")
OFFERED = ("function", "namespace")  # types of tools; the model gets no others
TOOL_NEUTRAL = {"allowed_callers": ([], ["direct"]), "async": (False,), "output_schema": ()}


def _items(value: object) -> object:
    """A text as one message; refuses items of other types than this server has. An answer may have no content. Calls of other
    tools, in earlier turns by another model, are left out: an empty item keeps their place."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidParameter(f"must be a string or a list of 1 to {MAX_MESSAGES} items")
    items = []
    for index, item in enumerate(with_earlier_as_text(value, lambda kind: kind not in _TEXT_PARTS)):
        if not isinstance(item, dict):
            raise InvalidParameter(f"[{index}]: must be an object with a type")
        kind = item.get("type") or "message"
        if kind == "item_reference":
            raise Unsupported(f"[{index}]: must have an id")
        if kind not in _ITEMS and isinstance(kind, str) and kind.endswith(_OTHER_TOOLS):
            item, kind = {}, "reasoning"
        if kind not in _ITEMS:
            raise Unsupported(f"[{index}].type: the types supported here are {', '.join(_ITEMS)}")
        content = {"content": ""} if item.get("role") == "assistant" else {}
        items.append({**content, **{name: each for name, each in item.items() if each is not None}, "type": kind})
    return items


def _offered(value: object) -> object:
    return only_offered(value, OFFERED)


def _result(value: object) -> str:
    return joined_texts(only_text(value, _TEXT_PARTS), _TEXT_PARTS)


_Parts = str | list[dict[str, Any]]
Text = Annotated[str, BeforeValidator(partial(joined_texts, types=_TEXT_PARTS), json_schema_input_type=_Parts)]
Result = Annotated[str, BeforeValidator(_result, json_schema_input_type=_Parts)]


class MessageItem(Body):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Text = Field(description="A string, or a list of parts of type input_text or output_text.")


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str = Field(max_length=MAX_ID_CHARS)
    name: str
    namespace: str | None = None
    arguments: str | dict[str, Any] = Field("", max_length=MAX_ARGUMENT_CHARS)


class FunctionCallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str = Field(max_length=MAX_ID_CHARS)
    output: Result = Field("", description="A string, or a list of parts. Images in it become a text that says so.")


class ReasoningItem(Body):
    """The model's own reasoning; chat templates that read it get it."""

    type: Literal["reasoning"]
    content: Text = ""
    summary: Text = Field("", description="Not read.")


_Item = Annotated[
    Annotated[MessageItem, Tag(KIND_MARK + "message")]
    | Annotated[FunctionCallItem, Tag(KIND_MARK + "function_call")]
    | Annotated[FunctionCallOutputItem, Tag(KIND_MARK + "function_call_output")]
    | Annotated[ReasoningItem, Tag(KIND_MARK + "reasoning")],
    Discriminator(kind_of),
]
Items = Annotated[list[_Item], FailFast(), BeforeValidator(_items, json_schema_input_type=str | list[_Item])]


class FunctionTool(CheckedBody):
    neutral: ClassVar[Neutral] = TOOL_NEUTRAL
    type: str = Field(description="function. Tools of other types are accepted, and not offered to the model.")
    name: str | None = Field(None, description="Required.")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag = None

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if self.type in OFFERED and self.name is None:
            raise InvalidParameter("name: is required")
        return self


class ResponseTool(FunctionTool):
    """A function of the client, or of type `namespace` a group of them."""

    tools: Annotated[list[FunctionTool] | None, BeforeValidator(_offered)] = Field(
        None, max_length=MAX_TOOLS, description="Of a namespace."
    )


Tools = Annotated[
    list[ResponseTool],
    FailFast(),
    Field(max_length=MAX_TOOLS),
    BeforeValidator(_offered, json_schema_input_type=list[ResponseTool | dict[str, Any]]),
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise InvalidParameter("schema: is required for type json_schema")
        return self


class TextConfig(Body):
    format: TextFormat | None = None


class Reasoning(CheckedBody):
    neutral: ClassVar[Neutral] = {"context": ("auto",), "mode": ("standard",)}
    effort: str | None = Field(None, description="For chat templates that read it.")
    summary: str | None = Field(None, description="Accepted: the answer has the whole reasoning.")
