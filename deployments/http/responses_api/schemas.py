"""The body of OpenAI's responses, which is also the body of a chat. What it refers to is in its input already."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import FailFast, Field, PlainValidator, PrivateAttr, WithJsonSchema, model_validator

from deployments.http.responses_api.content import Items, Reasoning, TextConfig, Tools
from deployments.http.responses_api.to_chat import NAMES, chat_messages, chat_tool_choice, chat_tools, response_format
from deployments.openai.dialog_fields import TemplateOptions
from deployments.openai.errors import Unsupported
from deployments.openai.field_types import MAX_TOKENS, Flag, OptionalInteger
from deployments.openai.sampling_fields import SamplingFields
from deployments.openai.translation import TranslatedChat, translated
from deployments.openai.unsupported import (
    CHAT_NEUTRAL,
    CHATS_OWN,
    CheckedBody,
    Neutral,
    any_value,
    empty,
    equals,
    has,
)
from llama_core.errors import InvalidParameter

MAX_METADATA = 16  # entries, as OpenAI has it
MAX_KEY_CHARS, MAX_VALUE_CHARS = 64, 512
MAX_INCLUDED = 64
_METADATA_SCHEMA = {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MAX_METADATA}
SAME_FIELDS = ("model", "stream", "parallel_tool_calls", *SamplingFields.model_fields, *TemplateOptions.model_fields)
LOGPROBS = "message.output_text.logprobs"
NEUTRAL: Neutral = CHAT_NEUTRAL | CHATS_OWN | {
    "access_programs": has(cyber=equals("standard")), "context_management": empty,
    "background_options": has(completion_window=equals("soonest")),
    "image": has(context_compression=equals("auto", "disabled")),
    "prompt_cache_options": has(prewarm=equals(False)),
    "service_tier": any_value, "stream_options": any_value,
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
    input: Items = Field(description="A string, or items: messages, function calls with their outputs, reasoning.")
    instructions: str | None = Field(None, description="The system message.")
    tools: Tools = Field(default_factory=list)
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
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
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
                raise Unsupported(f"{name}: this server stores no responses: {how}", param=name)
        if LOGPROBS in self.include:
            raise Unsupported("include: log-probabilities are at /v1/chat/completions", param="include")
        return self

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        given = None if self.text is None else self.text.format
        if self.structured_outputs and given is not None and given.type != "text":
            message = "structured_outputs: excludes text.format: send one of them"
            raise InvalidParameter(message, param="structured_outputs")
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
