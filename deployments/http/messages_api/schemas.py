"""The bodies of Anthropic's messages, and the body of a chat that each of them stands for."""

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Self

from pydantic import Field, PrivateAttr, model_validator

from deployments.http.messages_api import content
from deployments.openai.field_types import MAX_TOKENS, Flag, Integer, OptionalInteger
from deployments.openai.schemas import sampled
from deployments.openai.translation import ChatMessages, TranslatedChat, translated
from deployments.openai.unsupported import ANY, CHAT_NEUTRAL, CHATS_OWN, EMPTY, TEMPLATE_NEUTRAL, CheckedBody, Neutral
from llama_core.errors import InvalidParameter

NAMES: Final = {
    "parameters": "input_schema",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "continue_final_message": "messages (the last one is the assistant's, and the answer would continue it)",
}
CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def chat_messages(system: Sequence[content.TextBlock], messages: Sequence[content.InputMessage]) -> ChatMessages:
    chat = ChatMessages([], [])
    if system:
        chat.add("system", "system", _joined(system))
    for index, message in enumerate(messages):
        _add_message(chat, message, f"messages[{index}]")
    return chat


def tool_fields(tools: Sequence[content.InputTool], choice: content.ToolChoice | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if offered := [_function(tool) for tool in tools if tool.is_offered]:
        fields["tools"] = offered
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else CHOICES[choice.type]
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


def _function(tool: content.InputTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def output_fields(config: content.OutputConfig | None, older: content.OutputFormat | None) -> dict[str, Any]:
    """older: the format under its older name."""
    fields: dict[str, Any] = {}
    asked = older if config is None or config.format is None else config.format
    if asked is not None:
        schema = {"name": "answer", "schema": asked.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    return fields


def _add_message(messages: ChatMessages, message: content.InputMessage, place: str) -> None:
    """One message as one of a chat; its results of tools are messages of their own, in their order."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    num_results = 0
    for index, block in enumerate(message.content):
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "tool_result":
            num_results += 1
            if texts:
                messages.add(place, message.role, "\n".join(texts))
                texts.clear()
            messages.add(f"{place}.content[{index}]", "tool", _result(block), tool_call_id=block.tool_use_id)
        elif block.type == "thinking":
            thoughts.append(block.thinking)
    fields: dict[str, Any] = {"tool_calls": calls} if calls else {}
    if thoughts and message.role == "assistant":
        fields["reasoning_content"] = "\n".join(thoughts)
    if texts or fields or not num_results:
        messages.add(place, message.role, "\n".join(texts), **fields)


def _result(block: content.ToolResultBlock) -> str:
    """Chats have no field for a result that is an error."""
    return ("Error: " if block.is_error else "") + _joined(block.content)


def _joined(blocks: Sequence[content.TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _keeps_the_context(edits: object) -> bool:
    """Coding agents ask that no thinking is cleared, which is what happens anyway."""
    keeps_all = {"type": "clear_thinking_20251015", "keep": "all"}
    return isinstance(edits, list) and all(edit == keeps_all for edit in edits)


PROMPT_NEUTRAL: Neutral = TEMPLATE_NEUTRAL | {
    "container": (), "mcp_servers": EMPTY, "thread": (), "context_management": {"edits": _keeps_the_context},
}  # fmt: skip
SAME_FIELDS = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed")
NEUTRAL: Neutral = CHAT_NEUTRAL | CHATS_OWN | PROMPT_NEUTRAL | {
    "compaction": (), "fallbacks": ([], "default"), "inference_geo": ("global",), "billing_policy": {"bill_to": ("self",)},
    **dict.fromkeys(("fallback_credit_token", "cache_control", "diagnostics", "service_tier", "speed"), ANY),
}  # fmt: skip


class CountTokensBody(CheckedBody):
    """The fields that make the prompt."""

    neutral: ClassVar[Neutral] = PROMPT_NEUTRAL
    model: str | None = Field(None, description="May be absent: one model is served.")
    messages: content.InputMessages
    system: content.System = Field(default_factory=list, description="A string, or text blocks.")
    tools: content.InputTools = Field(default_factory=list)
    tool_choice: content.ToolChoice | None = None
    thinking: content.Thinking | None = Field(None, description="A model that reasons does so in any case.")
    output_config: content.OutputConfig | None = None
    output_format: content.OutputFormat | None = Field(None, description="The older name of output_config.format.")
    _chat: TranslatedChat = PrivateAttr()

    @property
    def chat(self) -> TranslatedChat:
        """The same request as a chat."""
        return self._chat

    @model_validator(mode="after")
    def _translate(self) -> Self:
        """In the thread that parses long bodies."""
        messages = chat_messages(self.system, self.messages)
        fields = tool_fields(self.tools, self.tool_choice) | output_fields(self.output_config, self.output_format)
        names = NAMES if self.output_format is None else NAMES | {"response_format": "output_format"}
        places = [f"tools[{index}]" for index, tool in enumerate(self.tools) if tool.is_offered]
        last = messages.messages[-1]  # of the assistant: the answer continues it
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
            fields["continue_final_message"] = True
        self._chat = translated(self._own_fields() | fields, messages, names, places)
        return self

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        newer = None if self.output_config is None else self.output_config.format
        if self.output_format is not None and newer is not None and newer != self.output_format:
            raise InvalidParameter.of("output_format", "is the older name of output_config.format: send one of them")
        return self

    def _own_fields(self) -> dict[str, Any]:
        """The fields of a chat that are neither messages nor tools."""
        return {"model": self.model}


class MessagesBody(CountTokensBody):
    neutral: ClassVar[Neutral] = NEUTRAL
    max_tokens: Integer = Field(
        ge=1, le=MAX_TOKENS, description="New tokens at most; may be more than the context has room for."
    )
    stop_sequences: content.StopSequences = Field(default_factory=list)
    stream: Flag = None
    temperature: float | None = sampled("temperature", "0 is greedy.", most=2)
    top_p: float | None = sampled("top_p", "0 is greedy.", low=0)
    top_k: OptionalInteger = sampled("top_k", "0 or -1: no limit.", low=-1)
    seed: OptionalInteger = sampled("seed", "An addition: the same seed gives the same text.")
    metadata: content.Metadata | None = Field(None, description="`user_id` is chat's `user`.")

    def _own_fields(self) -> dict[str, Any]:
        user = None if self.metadata is None else self.metadata.user_id
        same = {name: getattr(self, name) for name in SAME_FIELDS}
        hides = self.thinking is not None and (self.thinking.type == "disabled" or self.thinking.display == "omitted")
        return {**same, "stop": self.stop_sequences, "user": user, "include_reasoning": not hides}
