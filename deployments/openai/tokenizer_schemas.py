"""The bodies of `/tokenize` and `/detokenize`."""

from typing import Self

from pydantic import Field, model_validator

from deployments.openai.dialog_fields import DialogOptions, Messages
from deployments.openai.field_types import MAX_TEXT_BYTES, Body, Flag, Ids
from deployments.openai.tool_fields import Tools
from llama_core.errors import InvalidParameter


class TokenizeBody(DialogOptions):
    """Either a text, or the messages of a chat, which are tokenized by the chat template."""

    model: str | None = None
    prompt: str | None = Field(None, max_length=MAX_TEXT_BYTES)
    messages: Messages = Field(default_factory=list)
    tools: Tools = Field((), description="Functions that the prompt offers beside the messages.")
    add_special_tokens: Flag = Field(None, description="Default true: BOS first.")
    parse_special: Flag = Field(None, description="true: names of control tokens in the prompt become those tokens.")
    return_token_strs: Flag = Field(None, description="true: the answer has the name of each token.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise InvalidParameter("prompt: send either prompt or messages", param="prompt")
        if self.tools and not self.messages:
            raise InvalidParameter("tools: needs messages, beside which the prompt offers them", param="tools")
        if self.prompt is not None and len(self.prompt.encode()) > MAX_TEXT_BYTES:
            raise InvalidParameter(f"prompt: must have at most {MAX_TEXT_BYTES} bytes of UTF-8", param="prompt")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Ids = Field(max_length=2**20)
    skip_special_tokens: Flag = Field(None, description="false: the text has the names of control tokens.")
