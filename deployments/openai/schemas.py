"""The bodies of completions and chats: every field typed strictly and every number bounded.

Unknown fields are ignored and null means absent, because clients send both; `unsupported.py` has the fields of OpenAI and vLLM
that are refused. Knows nothing of the model: `plan.py` checks the context, the vocabulary and a dialog's order.
"""

from typing import Any, Self

from pydantic import Field, model_validator

from deployments.openai.dialog_fields import DialogOptions, Messages
from deployments.openai.field_types import (
    MAX_CHOICES,
    MAX_NAME_CHARS,
    MAX_PRIORITY,
    MAX_STOPS,
    MAX_TOKENS,
    NO_LIMIT,
    BadWords,
    Body,
    BodyWithUnknownFields,
    Flag,
    Ids,
    LogitBias,
    OptionalInteger,
    Prompt,
    Stop,
    User,
)
from deployments.openai.tool_fields import Choice, ChosenTools, FunctionCall, Functions, Tools, tool_use
from llama_core.errors import InvalidParameter
from llama_core.scheduling.sampling_params import MAX_TOP_LOGPROBS, SLOT_FIELDS
from llama_core.text.tools.tool import Tool, ToolUse


def sampled(name: str, text: str, *, most: float | None = None, low: float | None = None) -> Any:
    """The field of a `PerSlot` parameter, with its range in the API reference. most: where HTTP allows less, as OpenAI does.
    low: where HTTP has another name for a value of the range."""
    mark = SLOT_FIELDS[name]
    least = mark.low if low is None else low
    bounds = {"exclusiveMinimum" if mark.is_open and low is None else "minimum": least, "maximum": most or mark.high}
    return Field(default=None, le=most, description=text, json_schema_extra=bounds)  # type: ignore[arg-type]


# The sampling parameters of completions, chats and OpenAI's responses, as vLLM has them. `SamplingParams` checks their ranges,
# for HTTP as for Python.
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
    priority: OptionalInteger = Field(
        None, ge=0, le=MAX_PRIORITY, description="0, the default, is served first, 100 while there is nothing else."
    )
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


class StreamOptions(Body):
    include_usage: Flag = None
    continuous_usage_stats: Flag = None


class GenerationBody(SamplingFields, BodyWithUnknownFields):
    """The fields that completions and chat completions share."""

    model: str | None = Field(None, description="May be absent: one model is served.")
    max_tokens: OptionalInteger = Field(
        None, ge=NO_LIMIT, le=MAX_TOKENS, description="New tokens at most; -1: no limit."
    )
    n: OptionalInteger = Field(None, ge=1, le=MAX_CHOICES, description=f"prompts * n is at most {MAX_CHOICES}.")
    stream: Flag = None
    stream_options: StreamOptions | None = None
    service_tier: str | None = Field(None, max_length=MAX_NAME_CHARS, description='Any; the answer says "default".')
    min_tokens: OptionalInteger = Field(None, ge=0, le=MAX_TOKENS, description="No end before so many tokens.")
    bad_words: BadWords = Field(default_factory=list, description="Words that are not generated.")
    allowed_token_ids: Ids = Field(
        default_factory=list, description="Only these and the ids that end an answer are sampled."
    )
    prompt_logprobs: OptionalInteger = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="vLLM's: of each of the prompt's tokens. Not with stream."
    )
    return_token_ids: Flag = Field(None, description="vLLM's: the answer has the ids of the prompt and of each choice.")
    return_tokens_as_token_ids: Flag = Field(None, description="vLLM's: log-probabilities name tokens `token_id:ID`.")

    response_format: dict[str, Any] | None = Field(
        None,
        description="text, json_object, json_schema (OpenAI's) or structural_tag (vLLM's).",
    )
    max_completion_tokens: OptionalInteger = Field(
        None, ge=NO_LIMIT, le=MAX_TOKENS, description="The same as max_tokens, which it comes before."
    )

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def name_of_limit(self) -> str:
        """The field that has `token_limit`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter.of("stream_options", "needs stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidParameter.of(
                "prompt_logprobs", "a stream has none: leave out stream, or send echo and logprobs to /v1/completions"
            )
        return self

    def check_min_tokens(self, most: int) -> None:
        """Raises InvalidParameter unless the answer may have `min_tokens` tokens. most: tokens of the answer at most."""
        if self.min_tokens is not None and self.min_tokens > most:
            limit = self.name_of_limit if most == self.token_limit else "max_tokens, or the rest of the context,"
            raise InvalidParameter.of("min_tokens", f"must be at most {most}, as {limit} is")


class CompletionBody(GenerationBody):
    prompt: Prompt
    echo: Flag = None
    logprobs: OptionalInteger = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: OptionalInteger = Field(
        None, ge=1, le=MAX_CHOICES, description="Samples so many, and returns the n most likely."
    )
    add_special_tokens: Flag = Field(None, description="false: no BOS before a text prompt.")
    parse_special: Flag = Field(None, description="true: names of control tokens in a text prompt become those tokens.")

    @property
    def num_sampled(self) -> int:
        """Answers to each prompt that are generated; n of them are returned."""
        return self.best_of or self.n or 1

    @model_validator(mode="after")
    def _choices_agree(self) -> Self:
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise InvalidParameter.of("best_of", "must not be less than n")
        if self.best_of is not None and self.best_of > n and self.stream:
            raise InvalidParameter.of(
                "best_of", "a stream begins before the best is known: leave out stream, or send best_of equal to n"
            )
        if self.token_limit == 0 and not self.echo:
            name = self.name_of_limit
            raise InvalidParameter.of(name, "0 needs echo to be true: the answer is then the prompt")
        if len(self.prompt) * self.num_sampled > MAX_CHOICES:
            name = "n" if self.num_sampled == n else "best_of"
            raise InvalidParameter.of(name, f"prompts * {name} must be at most {MAX_CHOICES}")
        return self


class ChatBody(DialogOptions, GenerationBody):
    messages: Messages
    tools: Tools = Field((), description="Functions that the model may call.")
    tool_choice: Choice | None = Field(
        None, description="none, auto (the default), required, a function or allowed_tools."
    )
    parallel_tool_calls: Flag = Field(None, description="false: one call at most.")
    functions: Functions = Field((), description="The older form of tools; the answer has `function_call`.")
    function_call: FunctionCall | None = Field(None, description="The older form of tool_choice.")
    reasoning_effort: str | None = Field(
        None, max_length=MAX_NAME_CHARS, description="For chat templates that read it, such as low."
    )
    include_reasoning: Flag = Field(None, description="vLLM's, false: the answer has no reasoning_content.")
    logprobs: Flag = None
    top_logprobs: OptionalInteger = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def effort(self) -> str | None:
        """`reasoning_effort`, also as OpenRouter has it."""
        reasoning = (self.model_extra or {}).get("reasoning")
        word = reasoning.get("effort") if isinstance(reasoning, dict) and self.reasoning_effort is None else None
        return word[:MAX_NAME_CHARS] if isinstance(word, str) else self.reasoning_effort

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools in either form."""
        return self.tools or self.functions

    @property
    def is_legacy(self) -> bool:
        """Whether the answer has `function_call`."""
        return bool(self.functions) and not self.tools

    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None for plain text. Raises InvalidParameter."""
        if self.is_legacy or (self.function_call is not None and not self.tools and self.tool_choice is None):
            return tool_use(self.functions, self.function_call, parallel=False, is_legacy=True)
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @model_validator(mode="after")
    def _tools_have_one_form(self) -> Self:
        """Of fields with an older form, the answer follows one alone."""
        if self.functions and self.tools and self.functions != self.tools:
            raise InvalidParameter.of("functions", "is the older form of tools: send one of them")
        auto = ChosenTools("auto")
        if self.is_legacy and self.tool_choice is not None and self.tool_choice != (self.function_call or auto):
            raise InvalidParameter.of("tool_choice", "belongs to tools: send function_call beside functions")
        if self.tools and self.function_call is not None and self.function_call != (self.tool_choice or auto):
            raise InvalidParameter.of("function_call", "belongs to functions: send tool_choice beside tools")
        return self

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        if self.token_limit == 0:
            name = self.name_of_limit
            raise InvalidParameter.of(name, "must be at least 1, or -1 for no limit")
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter.of("top_logprobs", "needs logprobs to be true")
        return self
