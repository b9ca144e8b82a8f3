"""The body of OpenAI's responses, and the body of a chat that it stands for. What it refers to is in its input already."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self

from pydantic import FailFast, Field, PlainValidator, PrivateAttr, WithJsonSchema, model_validator

from deployments.http.responses_api import content
from deployments.openai.dialog_fields import TemplateOptions
from deployments.openai.errors import Unsupported
from deployments.openai.field_types import MAX_TOKENS, Flag, OptionalInteger
from deployments.openai.schemas import SamplingFields
from deployments.openai.translation import ChatMessages, TranslatedChat, translated
from deployments.openai.unsupported import ANY, CHAT_NEUTRAL, CHATS_OWN, EMPTY, CheckedBody, Neutral
from llama_core.errors import InvalidParameter

NAMES: Final = {"response_format": "text.format", "max_tokens": "max_output_tokens", "messages": "input"}
Item = content.MessageItem | content.FunctionCallItem | content.FunctionCallOutputItem | content.ReasoningItem


def chat_messages(instructions: str | None, items: Sequence[Item]) -> ChatMessages:
    """Neighbouring reasoning, text and calls of the assistant are one message."""
    chat = ChatMessages([], [])
    if instructions:
        chat.add("instructions", "system", instructions)
    thoughts: list[str] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if isinstance(item, content.ReasoningItem):
            if item.content:
                thoughts.append(item.content)
            continue
        fields = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        if isinstance(item, content.FunctionCallItem):
            _add_call(chat, item, place, fields)
        elif isinstance(item, content.FunctionCallOutputItem):
            chat.add(place, "tool", item.output, tool_call_id=item.call_id)
        else:
            chat.add(place, item.role, item.content, **(fields if item.role == "assistant" else {}))
        thoughts.clear()
    return chat


class ChatTools(NamedTuple):
    """The functions that the model is offered, and the place of each in the client's body. namespaces: by the name that the
    model sees, the namespace and the name of those that have one."""

    functions: list[dict[str, Any]]
    places: list[str]
    namespaces: dict[str, tuple[str, str]]


def chat_tools(tools: Sequence[content.ResponseTool]) -> ChatTools:
    """Functions of namespaces stand beside the others. Tools of other types are left out."""
    chat = ChatTools([], [], {})
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if tool.type == "function":
            _add_function(chat, tool, place)
        elif tool.type == "namespace":
            for inner, function in enumerate(tool.tools or ()):
                if function.type == "function":
                    _add_function(chat, function, f"{place}.tools[{inner}]", tool.name)
    return chat


def _add_function(chat: ChatTools, tool: content.FunctionTool, place: str, namespace: str | None = None) -> None:
    name = _in_namespace(namespace, tool.name)
    if namespace and tool.name:
        chat.namespaces[name] = namespace, tool.name
    function = {**tool.model_dump(exclude={"type", "tools"}, exclude_none=True), "name": name}
    chat.functions.append({"type": "function", "function": function})
    chat.places.append(place)


def _in_namespace(namespace: Any, name: Any) -> Any:
    """The name of a function as the model sees it: chats have no namespaces."""
    return f"{namespace}__{name}" if namespace and name else name


def _add_call(chat: ChatMessages, item: content.FunctionCallItem, place: str, fields: dict[str, Any]) -> None:
    if fields or not chat.messages or chat.messages[-1]["role"] != "assistant":
        chat.add(place, "assistant", "", **fields)
    function = {"name": _in_namespace(item.namespace, item.name), "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    chat.messages[-1].setdefault("tool_calls", []).append(call)


def chat_tool_choice(choice: Any) -> Any:
    """OpenAI's flat forms as those of chat completions."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": _in_namespace(choice.get("namespace"), choice.get("name"))}}
    if choice.get("type") == "allowed_tools" and isinstance(tools := choice.get("tools"), list):
        named = [chat_tool_choice(tool) for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return choice


def response_format(given: content.TextFormat | None) -> dict[str, Any] | None:
    if given is None or given.type != "json_schema":
        return None if given is None else {"type": given.type}
    return {"type": "json_schema", "json_schema": {"name": given.name or "answer", "schema": given.schema_}}


MAX_METADATA = 16  # entries, as OpenAI has it
MAX_KEY_CHARS, MAX_VALUE_CHARS = 64, 512
MAX_INCLUDED = 64
_METADATA_SCHEMA = {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MAX_METADATA}
SAME_FIELDS = ("model", "stream", "parallel_tool_calls", *SamplingFields.model_fields, *TemplateOptions.model_fields)
LOGPROBS = "message.output_text.logprobs"
NEUTRAL: Neutral = CHAT_NEUTRAL | CHATS_OWN | {
    "access_programs": {"cyber": ("standard",)}, "background_options": {"completion_window": ("soonest",)},
    "context_management": EMPTY, "image": {"context_compression": ("auto", "disabled")}, "service_tier": ANY,
    "prompt_cache_options": {"prewarm": (False,)}, "stream_options": ANY,
}  # fmt: skip


def _metadata(value: object) -> dict[str, str]:
    """A validator of our own: pydantic reports an error for each of any number of entries."""
    if (
        not isinstance(value, dict)
        or len(value) > MAX_METADATA
        or not all(isinstance(text, str) for text in value.values())
    ):
        raise InvalidParameter(f"must be an object of at most {MAX_METADATA} strings")
    if any(len(key) > MAX_KEY_CHARS or len(text) > MAX_VALUE_CHARS for key, text in value.items()):
        raise InvalidParameter(f"may have {MAX_KEY_CHARS} characters a key and {MAX_VALUE_CHARS} a value at most")
    return value


Metadata = Annotated[dict[str, str], PlainValidator(_metadata), WithJsonSchema(_METADATA_SCHEMA)]


class ResponsesBody(SamplingFields, TemplateOptions, CheckedBody):
    neutral: ClassVar[Neutral] = NEUTRAL
    model: str | None = Field(None, description="May be absent: one model is served.")
    input: content.Items = Field(
        description="A string, or items: messages, function calls with their outputs, reasoning."
    )
    instructions: str | None = Field(None, description="The system message.")
    tools: content.Tools = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto (the default), required, a function or allowed_tools."
    )
    parallel_tool_calls: Flag = Field(None, description="false: one call at most.")
    max_output_tokens: OptionalInteger = Field(
        None, ge=1, le=MAX_TOKENS, description="May fill the context unless limited."
    )
    max_tool_calls: OptionalInteger = Field(
        None, ge=0, le=MAX_TOKENS, description="Of OpenAI's own tools, of which there are none here. Echoed."
    )
    text: content.TextConfig | None = None
    reasoning: content.Reasoning | None = None
    metadata: Metadata | None = Field(None, description="Echoed.")
    stream: Flag = None
    store: Flag = Field(None, description="false: the answer is not kept.")
    truncation: Literal["auto", "disabled"] | None = Field(None, description="Nothing is cut: the input has to fit.")
    include: Annotated[list[str], FailFast()] = Field(
        default_factory=list, max_length=MAX_INCLUDED, description="Accepted, except for logprobs."
    )
    prompt_cache_key: str | None = Field(None, description="Accepted: prefixes are cached anyway.")
    safety_identifier: str | None = None
    previous_response_id: str | None = Field(
        None, description="Of an answer that is kept: its input and output come first."
    )
    conversation: str | dict[str, Any] | None = Field(None, description="Not supported: nothing is stored.")
    background: Flag = Field(None, description="Only false: nothing is stored.")
    prompt: dict[str, Any] | None = Field(None, description="Not supported: nothing is stored.")
    _chat: TranslatedChat = PrivateAttr()
    _namespaces: dict[str, tuple[str, str]] = PrivateAttr()

    @property
    def chat(self) -> TranslatedChat:
        """The same request as a chat."""
        return self._chat

    @property
    def namespaces(self) -> Mapping[str, tuple[str, str]]:
        """By the name that the model sees, the namespace and the name of each function that has a namespace."""
        return self._namespaces

    @model_validator(mode="after")
    def _is_stateless(self) -> Self:
        for name in ("previous_response_id", "conversation", "background", "prompt"):
            if getattr(self, name) not in (None, False):
                how = "leave it out or send false" if name == "background" else "send the whole input"
                raise Unsupported.of(name, f"this server stores no responses: {how}")
        if LOGPROBS in self.include:
            raise Unsupported.of("include", "log-probabilities are at /v1/chat/completions")
        return self

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        given = None if self.text is None else self.text.format
        if self.structured_outputs and given is not None and given.type != "text":
            raise InvalidParameter.of("structured_outputs", "excludes text.format: send one of them")
        return self

    @model_validator(mode="after")
    def _translate(self) -> Self:
        """In the thread that parses long bodies."""
        tools = chat_tools(self.tools)
        self._namespaces = tools.namespaces
        fields = {name: getattr(self, name) for name in SAME_FIELDS}
        fields |= {
            "logit_bias": {str(token): bias for token, bias in self.logit_bias.items()},  # as JSON has it
            "max_tokens": self.max_output_tokens,
            "tools": tools.functions,
            "tool_choice": chat_tool_choice(self.tool_choice),
            "response_format": response_format(None if self.text is None else self.text.format),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        self._chat = translated(fields, chat_messages(self.instructions, self.input), NAMES, tools.places)
        return self
