"""The sampling parameters that completions, chats and OpenAI's responses share, as vLLM has them on these routes."""

from typing import Any

from pydantic import Field

from deployments.http.field_types import (
    MAX_PRIORITY,
    MAX_STOPS,
    MAX_TOKENS,
    Body,
    Flag,
    Ids,
    LogitBias,
    OptionalInteger,
    Stop,
    number,
)
from llama_core.scheduling.sampling_params import INT64_MAX, INT64_MIN, MAX_STOP_TOKENS


class SamplingFields(Body):
    temperature: float | None = number(0, 2, "0 is greedy. Default 0.6, as in Meta's reference, or the server's.")
    top_p: float | None = number(0, 1, "0 is greedy. Default 0.9, or the server's.")
    top_k: OptionalInteger = Field(None, ge=-1, le=MAX_TOKENS, description="0 or -1: no limit.")
    seed: OptionalInteger = Field(None, ge=INT64_MIN, le=INT64_MAX, description="The same seed gives the same text.")
    stop: Stop = Field(
        default_factory=list, description=f"Up to {MAX_STOPS} strings that end the answer, which leaves them out."
    )
    ignore_eos: Flag = Field(None, description="Generate up to the limit of tokens.")
    skip_special_tokens: Flag = Field(None, description="false: the text has the names of control tokens.")
    user: str | None = Field(
        None, description="Users share the server fairly; where API keys are configured, keys do instead."
    )
    priority: OptionalInteger = Field(None, ge=0, le=MAX_PRIORITY, description="0, the default, is served first.")
    presence_penalty: float | None = number(-2, 2, "Lowers the logit of every token that the answer has.")
    frequency_penalty: float | None = number(-2, 2, "Lowers a token's logit once for each time that the answer has it.")
    repetition_penalty: float | None = Field(
        None,
        gt=0,
        le=10,
        allow_inf_nan=False,
        description="Divides positive logits of tokens of prompt and answer. 1: none.",
    )
    min_p: float | None = number(0, 1, "Leaves out tokens below this part of the most likely one's probability.")
    logit_bias: LogitBias = Field(default_factory=dict, description="Token id -> number from -100 to 100.")
    stop_token_ids: Ids = Field(
        default_factory=list, max_length=MAX_STOP_TOKENS, description="Further ids that end the answer."
    )
    include_stop_str_in_output: Flag = Field(None, description="true: the answer has the stop string that ended it.")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="vLLM's: one of json, regex, choice, grammar (Lark or GBNF), json_object, structural_tag."
    )
