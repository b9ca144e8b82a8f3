"""The bodies of Anthropic's messages, each of which is also the body of a chat."""

from typing import Any, Self

from pydantic import Field, PrivateAttr, model_validator

from deployments.http.field_types import MAX_TOKENS, Body, Flag, Stop
from deployments.http.messages_api.content import (
    InputMessages,
    InputTools,
    Metadata,
    OutputConfig,
    System,
    Thinking,
    ToolChoice,
)
from deployments.http.messages_api.to_chat import NAMES, chat_messages, ending_fields, output_fields, tool_fields
from deployments.http.translation import TranslatedChat, translated
from llama_core.scheduling.sampling_params import INT64_MAX, INT64_MIN


class CountTokensBody(Body):
    """The fields that make the prompt."""

    model: str | None = Field(None, description="May be absent: one model is served.")
    messages: InputMessages
    system: System = Field(default_factory=list, description="A string, or text blocks.")
    tools: InputTools = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="A model that reasons does so in any case.")
    output_config: OutputConfig | None = None
    _chat: TranslatedChat = PrivateAttr()

    @property
    def chat(self) -> TranslatedChat:
        """The same request as a chat."""
        return self._chat

    @model_validator(mode="after")
    def _translate(self) -> Self:
        """In the thread that parses long bodies."""
        messages = chat_messages(self.system, self.messages)
        fields = tool_fields(self.tools, self.tool_choice) | output_fields(self.output_config)
        self._chat = translated(self._own_fields() | fields | ending_fields(messages), messages, NAMES)
        return self

    def _own_fields(self) -> dict[str, Any]:
        """The fields of a chat that are neither messages nor tools."""
        return {"model": self.model}


class MessagesBody(CountTokensBody):
    max_tokens: int = Field(
        ge=1, le=MAX_TOKENS, description="New tokens at most; may be more than the context has room for."
    )
    stop_sequences: Stop = Field(default_factory=list)
    stream: Flag = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0, le=MAX_TOKENS)
    seed: int | None = Field(
        None, ge=INT64_MIN, le=INT64_MAX, description="An addition: the same seed gives the same text."
    )
    metadata: Metadata | None = Field(None, description="`user_id` is chat's `user`.")

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or (self.thinking.type != "disabled" and self.thinking.display != "omitted")

    def _own_fields(self) -> dict[str, Any]:
        """Without `max_tokens`, which `plan_messages` bounds by the context."""
        user = None if self.metadata is None else self.metadata.user_id
        same = {name: getattr(self, name) for name in ("model", "stream", "temperature", "top_p", "top_k", "seed")}
        return {**same, "stop": self.stop_sequences, "user": user}
