"""The bodies of Anthropic's messages, each of which is also the body of a chat."""

from typing import Any, ClassVar, Self

from pydantic import Field, PrivateAttr, model_validator

from deployments.http.messages_api.content import (
    InputMessages,
    InputTools,
    Metadata,
    OutputConfig,
    OutputFormat,
    StopSequences,
    System,
    Thinking,
    ToolChoice,
)
from deployments.http.messages_api.to_chat import NAMES, chat_messages, ending_fields, output_fields, tool_fields
from deployments.openai.field_types import MAX_TOKENS, Flag, Integer, OptionalInteger
from deployments.openai.sampling_fields import sampled
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
    no_value,
)
from llama_core.errors import InvalidParameter


def _keeps_the_context(edits: object) -> bool:
    """Coding agents ask that no thinking is cleared, which is what happens anyway."""
    keeps_all = {"type": "clear_thinking_20251015", "keep": "all"}
    return isinstance(edits, list) and all(edit == keeps_all for edit in edits)


PROMPT_NEUTRAL: Neutral = {
    "container": no_value, "mcp_servers": empty, "thread": no_value, "context_management": has(edits=_keeps_the_context),
    **{name: CHATS_OWN[name] for name in ("continue_final_message", "add_generation_prompt", "chat_template_kwargs")},
}  # fmt: skip
SAME_FIELDS = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed")
NEUTRAL: Neutral = CHAT_NEUTRAL | CHATS_OWN | PROMPT_NEUTRAL | {
    "compaction": no_value, "fallbacks": equals([], "default"), "inference_geo": equals("global"),
    "billing_policy": has(bill_to=equals("self")), "fallback_credit_token": any_value,
    "cache_control": any_value, "diagnostics": any_value, "service_tier": any_value, "speed": any_value,
}  # fmt: skip


class CountTokensBody(CheckedBody):
    """The fields that make the prompt."""

    neutral: ClassVar[Neutral] = PROMPT_NEUTRAL
    model: str | None = Field(None, description="May be absent: one model is served.")
    messages: InputMessages
    system: System = Field(default_factory=list, description="A string, or text blocks.")
    tools: InputTools = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="A model that reasons does so in any case.")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The older name of output_config.format.")
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
        self._chat = translated(self._own_fields() | fields | ending_fields(messages), messages, names, places)
        return self

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        newer = None if self.output_config is None else self.output_config.format
        if self.output_format is not None and newer is not None and newer != self.output_format:
            message = "output_format: is the older name of output_config.format: send one of them"
            raise InvalidParameter(message, param="output_format")
        return self

    def _own_fields(self) -> dict[str, Any]:
        """The fields of a chat that are neither messages nor tools."""
        return {"model": self.model}


class MessagesBody(CountTokensBody):
    neutral: ClassVar[Neutral] = NEUTRAL
    max_tokens: Integer = Field(
        ge=1, le=MAX_TOKENS, description="New tokens at most; may be more than the context has room for."
    )
    stop_sequences: StopSequences = Field(default_factory=list)
    stream: Flag = None
    temperature: float | None = sampled("temperature", "0 is greedy.", most=2)
    top_p: float | None = sampled("top_p", "0 is greedy.", low=0)
    top_k: OptionalInteger = sampled("top_k", "0 or -1: no limit.", low=-1)
    seed: OptionalInteger = sampled("seed", "An addition: the same seed gives the same text.")
    metadata: Metadata | None = Field(None, description="`user_id` is chat's `user`.")

    def _own_fields(self) -> dict[str, Any]:
        user = None if self.metadata is None else self.metadata.user_id
        same = {name: getattr(self, name) for name in SAME_FIELDS}
        hides = self.thinking is not None and (self.thinking.type == "disabled" or self.thinking.display == "omitted")
        return {**same, "stop": self.stop_sequences, "user": user, "include_reasoning": not hides}
