"""The messages of a chat, and how they become a prompt: fields that chats and the routes of the tokenizer share."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator

from deployments.openai.field_types import (
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    TEXT_PARTS,
    Body,
    BodyWithUnknownFields,
    Content,
    Flag,
    TemplateVariables,
    only_text,
    with_earlier_as_text,
)
from deployments.openai.tool_fields import MAX_ID_CHARS, ToolCalls
from llama_core.errors import InvalidParameter
from llama_core.text.chat_format import ChatOptions

_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")  # types of parts of an earlier answer
LEGACY_CALL_ID = "function_call"  # of calls in the older form, which have no ids


def _is_thought(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in _THOUGHTS


class ChatMessage(BodyWithUnknownFields):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = Field(description="May be null, or absent, in an answer of an earlier turn.")
    name: str | None = Field(None, max_length=MAX_NAME_CHARS, description="For chat templates that write it.")
    tool_calls: ToolCalls = Field(default_factory=list, description="The calls of an earlier answer.")
    tool_call_id: str | None = Field(
        None, max_length=MAX_ID_CHARS, description="The call that a tool's message answers."
    )
    reasoning_content: str | None = Field(
        None, description="The reasoning of an earlier answer, for templates that read it."
    )
    reasoning: str | None = Field(None, description="vLLM's name of reasoning_content, which comes first.")

    @model_validator(mode="before")
    @classmethod
    def _with_calls(cls, given: Any) -> Any:
        """An answer may have no content; the older `function_call` becomes a call. A tool's result may have images."""
        if not isinstance(given, dict):
            return given
        if not isinstance(given.get("reasoning", ""), str | None):  # another server's object, which no template reads
            given = {**given, "reasoning": None}
        if given.get("role") == "tool":
            content = given.get("content")
            return {**given, "content": "" if content is None else only_text(content, TEXT_PARTS)}
        if given.get("role") != "assistant":
            return given
        if isinstance(function := given.get("function_call"), dict) and not given.get("tool_calls"):
            call = {"id": LEGACY_CALL_ID, "type": "function", "function": function}
            given = {**given, "tool_calls": [call], "function_call": None}
        if isinstance(content := given.get("content"), list):
            thoughts = [part for part in content if _is_thought(part)]
            texts = [text for part in thoughts if isinstance(text := part.get("thinking", part.get("text")), str)]
            given = {**given, "content": [part for part in content if not _is_thought(part)]}
            given["reasoning_content"] = given.get("reasoning_content") or "\n".join(texts) or None
        if content is not None:
            return given
        refusal = given.get("refusal")
        return {**given, "content": refusal if isinstance(refusal, str) else ""}

    @property
    def reasoning_text(self) -> str | None:
        """The reasoning under either name."""
        return self.reasoning_content or self.reasoning

    @model_validator(mode="after")
    def _fits_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise InvalidParameter("tool_calls: only a message of the assistant has calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidParameter("tool_call_id: a message of a tool names the call that it answers")
        return self


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES),
    FailFast(),
    BeforeValidator(lambda value: with_earlier_as_text(value, lambda kind: kind not in (*TEXT_PARTS, *_THOUGHTS))),
]


class TemplateOptions(Body):
    chat_template_kwargs: TemplateVariables = Field(
        default_factory=dict, description="Variables of the model's chat template, such as enable_thinking."
    )
    enable_thinking: Flag = Field(None, description="The same in chat_template_kwargs comes first.")


class DialogOptions(TemplateOptions):
    """How a dialog becomes a prompt."""

    add_generation_prompt: Flag = Field(None, description="Default true: the prompt begins the assistant's message.")
    continue_final_message: Flag = Field(None, description="true: the answer goes on with the last message.")

    @property
    def chat_options(self) -> ChatOptions:
        continues = bool(self.continue_final_message)
        begins = not continues and self.add_generation_prompt is not False
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return ChatOptions(begins, continues, thinking | self.chat_template_kwargs)

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidParameter.of(
                "continue_final_message", "the prompt ends in the last message or after it: leave one field out"
            )
        return self
