"""The sampling parameters that completions, chats and OpenAI's responses share, as vLLM has them on these routes.

`SamplingParams` checks their ranges, for HTTP as for Python.
"""

from typing import Any

from pydantic import Field

from deployments.openai.field_types import (
    MAX_PRIORITY,
    MAX_STOPS,
    Body,
    Flag,
    Ids,
    LogitBias,
    OptionalInteger,
    Stop,
    User,
)
from llama_core.scheduling.sampling_params import SLOT_FIELDS


def sampled(name: str, text: str, *, most: float | None = None, low: float | None = None) -> Any:
    """The field of a `PerSlot` parameter, with its range in the API reference. most: where HTTP allows less, as OpenAI does.
    low: where HTTP has another name for a value of the range."""
    mark = SLOT_FIELDS[name]
    least = mark.low if low is None else low
    bounds = {"exclusiveMinimum" if mark.is_open and low is None else "minimum": least, "maximum": most or mark.high}
    return Field(default=None, le=most, description=text, json_schema_extra=bounds)  # type: ignore[arg-type]


class SamplingFields(Body):
    temperature: float | None = sampled("temperature", "0 is greedy. Default 0.6, or the server's.", most=2)
    top_p: float | None = sampled("top_p", "0 is greedy. Default 0.9, or the server's.", low=0)
    top_k: OptionalInteger = sampled("top_k", "0 or -1: no limit.", low=-1)
    seed: OptionalInteger = sampled("seed", "The same seed gives the same text.")
    stop: Stop = Field(
        default_factory=list, description=f"Up to {MAX_STOPS} strings that end the answer, which leaves them out."
    )
    ignore_eos: Flag = Field(None, description="Generate up to the limit of tokens.")
    skip_special_tokens: Flag = Field(None, description="false: the text has the names of control tokens.")
    user: User = Field(
        None, description="Users share the server fairly; where API keys are configured, keys do instead."
    )
    priority: OptionalInteger = Field(None, ge=0, le=MAX_PRIORITY, description="0, the default, is served first.")
    presence_penalty: float | None = sampled("presence_penalty", "Lowers the logit of every token that the answer has.")
    frequency_penalty: float | None = sampled(
        "frequency_penalty", "Lowers a token's logit once for each time that the answer has it."
    )
    repetition_penalty: float | None = sampled(
        "repetition_penalty", "Divides positive logits of tokens of prompt and answer. 1: none."
    )
    min_p: float | None = sampled("min_p", "Leaves out tokens below this part of the most likely one's probability.")
    logit_bias: LogitBias = Field(default_factory=dict, description="Token id -> number from -100 to 100.")
    stop_token_ids: Ids = Field(default_factory=list, description="Further ids that end the answer.")
    include_stop_str_in_output: Flag = Field(None, description="true: the answer has the stop string that ended it.")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="vLLM's: one of json, regex, choice, grammar (Lark or GBNF), json_object, structural_tag."
    )
