"""The parts of bodies of Anthropic's messages: content blocks, tools, and what the answer may be.

Unknown fields are ignored and null means absent, as in `deployments/openai/schemas.py`. `cache_control` is among them: prefixes
are cached anyway.
"""

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag, model_validator

from deployments.openai.errors import Unsupported
from deployments.openai.field_types import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TOKENS,
    ONLY_TEXT,
    Body,
    Flag,
    OptionalInteger,
    Stop,
    User,
    only_text,
    text_of,
    with_earlier_as_text,
)
from deployments.openai.tool_fields import MAX_ID_CHARS, MAX_TOOLS, only_offered
from deployments.openai.translation import kind_of
from deployments.openai.unsupported import CheckedBody, Neutral
from deployments.openai.validation import KIND_MARK
from llama_core.errors import InvalidParameter


def _blocks(block: Any, *kinds: str, is_result: bool = False) -> BeforeValidator:
    """A text as one block; refuses blocks of other types than `kinds`, which are those of the class or union `block`.

    is_result: of a tool. It may be null, and images in it become text.
    """

    def check(value: object) -> object:
        if is_result:
            value = [] if value is None else only_text(value, kinds)
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if not isinstance(value, list) or len(value) > MAX_CONTENT_PARTS:
            raise InvalidParameter(f"must be a string or a list of at most {MAX_CONTENT_PARTS} content blocks")
        return [_known(block, f"[{index}]", kinds) for index, block in enumerate(value)]

    accepted: Any = str | list[block | dict[str, Any]] | None if is_result else str | list[block]
    return BeforeValidator(check, json_schema_input_type=accepted)


def _known(block: object, place: str, kinds: Collection[str]) -> object:
    """The block, or one of `kinds` in its place: the text of a document, or nothing where the API's own tools were called."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        raise InvalidParameter(f"{place}: must be an object with a type")
    if kind in kinds:
        return block
    if kind == "document" and (text := text_of(block)) is not None:
        return {"type": "text", "text": text}
    if kind == "compaction" and isinstance(block.get("content"), str | None):
        return {"type": "text", "text": block.get("content") or ""}
    if kind.endswith(_OTHER_TOOLS) and "redacted_thinking" in kinds:
        return {"type": "redacted_thinking"}
    what = f"{ONLY_TEXT}; " if kind in _NOT_READ else ""
    raise Unsupported(f"{place}.type: {what}the types supported here are {', '.join(kinds)}")


def _list(value: object) -> object:
    """Refuses a text alone, which chats take as `stop`."""
    if isinstance(value, str):
        raise InvalidParameter("must be a list of strings")
    return value


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str = Field(max_length=MAX_ID_CHARS)
    name: str
    input: dict[str, Any] | str | None = Field(None, description="An object. A text stays one.")


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=MAX_ID_CHARS)
    content: Annotated[list[TextBlock], FailFast(), _blocks(TextBlock, "text", is_result=True)] = Field(
        default_factory=list
    )
    is_error: Flag = None


class ThinkingBlock(Body):
    """The model's own reasoning; chat templates that read it get it."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"]


_NOT_READ = ("image", "document")
_OTHER_TOOLS = ("_tool_use", "_tool_result")  # ends of the types of blocks of the API's own tools
_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
Block = Annotated[
    Annotated[TextBlock, Tag(KIND_MARK + "text")]
    | Annotated[ToolUseBlock, Tag(KIND_MARK + "tool_use")]
    | Annotated[ToolResultBlock, Tag(KIND_MARK + "tool_result")]
    | Annotated[ThinkingBlock, Tag(KIND_MARK + "thinking")]
    | Annotated[RedactedThinkingBlock, Tag(KIND_MARK + "redacted_thinking")],
    Discriminator(kind_of),
]


_ROLES = {"tool_use": "assistant", "tool_result": "user"}


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], FailFast(), _blocks(Block, *_KINDS)] = Field(
        description="A string, or content blocks."
    )

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> Self:
        for index, block in enumerate(self.content):
            if (role := _ROLES.get(block.type, self.role)) != self.role:
                raise InvalidParameter(
                    f".content[{index}]: a block of type '{block.type}' belongs to a message of role '{role}'"
                )
        return self


_CLIENTS = (None, "custom")  # types of tools


class InputTool(CheckedBody):
    """A tool of the client. The API's own tools are accepted, and not offered to the model."""

    neutral: ClassVar[Neutral] = {"allowed_callers": ([], ["direct"]), "input_examples": ([],)}
    type: str | None = Field(None, description="custom, or absent.")
    name: str | None = Field(None, description="Required.")
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(None, description="Required.")
    strict: Flag = Field(None, description="true: a keyword of the schema that cannot be followed is an error.")

    @property
    def is_offered(self) -> bool:
        return self.type in _CLIENTS

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        for name in ("name", "input_schema"):
            if self.is_offered and getattr(self, name) is None:
                raise InvalidParameter(f"{name}: is required")
        return self


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of the tool, for type 'tool'.")
    disable_parallel_tool_use: Flag = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise InvalidParameter("name: belongs to type 'tool', which needs it")
        return self


class Metadata(Body):
    user_id: User = None


class Thinking(Body):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: str | None = None
    budget_tokens: OptionalInteger = Field(
        None, ge=1, le=MAX_TOKENS, description="Not followed: max_tokens counts the reasoning too."
    )


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(CheckedBody):
    neutral: ClassVar[Neutral] = {"task_budget": ()}
    format: OutputFormat | None = Field(None, description="The answer is JSON by this schema.")
    effort: str | None = Field(None, description="For chat templates that read it.")


InputMessages = Annotated[
    list[InputMessage],
    FailFast(),
    Field(min_length=1, max_length=MAX_MESSAGES),
    BeforeValidator(lambda value: with_earlier_as_text(value, lambda kind: kind in _NOT_READ)),
]
StopSequences = Annotated[Stop, BeforeValidator(_list, json_schema_input_type=list[str])]
System = Annotated[list[TextBlock], FailFast(), _blocks(TextBlock, "text")]
InputTools = Annotated[
    list[InputTool],
    FailFast(),
    Field(max_length=MAX_TOOLS),
    BeforeValidator(
        lambda value: only_offered(value, _CLIENTS), json_schema_input_type=list[InputTool | dict[str, Any]]
    ),
]
