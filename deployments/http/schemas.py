"""The bodies that clients send: every field typed strictly and every number bounded.

Defines the valid values, and the fields of OpenAI and vLLM that this server does not support. Unknown fields are
ignored and null means absent, because clients send both. Knows nothing of the model: `plan.py` checks the context, the
vocabulary and the order of a dialog.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, WithJsonSchema, model_validator

from deployments.http.errors import Unsupported
from deployments.http.tool_fields import MAX_ID_CHARS, Choice, FunctionCall, Functions, ToolCalls, Tools, tool_use
from llama_core.errors import InvalidParameter
from llama_core.scheduling.sampling_params import (
    INT64_MAX,
    INT64_MIN,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
)
from llama_core.text.chat_format import ChatOptions
from llama_core.text.tools.tool import Tool, ToolUse

MAX_PRIORITY = 100
MAX_CHOICES = 128  # prompts * n of one request
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024
MAX_TOKENS = 2**31 - 1
NO_LIMIT = -1  # as llama.cpp's clients send it
MAX_NAME_CHARS = 256
MAX_BAD_WORD_CHARS = 64
LEGACY_CALL_ID = "function_call"  # of calls in the older form, which have no ids
MAX_TEMPLATE_VARIABLES = 16
MAX_VARIABLE_CHARS = 4096
MAX_TEXT_BYTES = 2**20  # of a text to tokenize, in UTF-8: each may become a token

TextPrompts = list[str]
IdPrompts = list[list[int]]


def _prompts(value: object) -> TextPrompts | IdPrompts:
    """A string, a list of strings, a list of ids or a list of id lists, as a list of prompts of one kind.

    A validator of our own: pydantic reports an error for each item of each type of a union, 400,000 for one bad body.
    """
    kinds = "must be a string, a list of strings, a list of token ids or a list of lists of token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidParameter(kinds)
    if not value:
        raise InvalidParameter("must not be an empty list")
    if set(map(type, value)) == {int}:  # the fastest check of thousands of ids; excludes bool
        return [value]
    if len(value) > MAX_CHOICES:
        raise InvalidParameter(f"must have at most {MAX_CHOICES} prompts")
    if all(isinstance(item, str) for item in value):
        return value
    if not all(isinstance(item, list) and set(map(type, item)) == {int} for item in value):
        raise InvalidParameter(kinds + ", none of them empty")
    return value


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise InvalidParameter("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise InvalidParameter(f"must have at most {MAX_STOPS} strings")
    if not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise InvalidParameter(f"each string must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def _content(value: object) -> str:
    """A string, or a list of text parts, joined by newlines as other servers do."""
    kinds = "must be a string or a list of text parts"
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_CONTENT_PARTS:
        raise InvalidParameter(f"{kinds} (at most {MAX_CONTENT_PARTS})")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InvalidParameter(f"{kinds}: each part is an object with a type")
        if part["type"] != "text":
            raise Unsupported("only parts of type 'text' are supported")
        if not isinstance(part.get("text"), str):
            raise InvalidParameter(f"{kinds}: each part has its text")
        texts.append(part["text"])
    return "\n".join(texts)


def _logit_bias(value: object) -> dict[int, float]:
    """Token id -> bias. Checks the shape only; `plan.py` checks the ids against the vocabulary."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        raise InvalidParameter(f"must be an object of at most {MAX_LOGIT_BIASES} token ids")
    if not all(key.isascii() and key.removeprefix("-").isdigit() and len(key) <= 20 for key in value):
        raise InvalidParameter("its keys must be token ids")
    if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
        raise InvalidParameter("its values must be numbers from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


def _bad_words(value: object) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_BAD_WORDS // 3:  # each in up to three spellings
        raise InvalidParameter(f"must be a list of at most {MAX_BAD_WORDS // 3} strings")
    if not all(isinstance(word, str) and 1 <= len(word) <= MAX_BAD_WORD_CHARS for word in value):
        raise InvalidParameter(f"each must be a string of 1 to {MAX_BAD_WORD_CHARS} characters")
    return value


def _template_variables(value: object) -> dict[str, object]:
    """Name -> string, number, bool or null. The chat format checks the names."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_VARIABLES:
        raise InvalidParameter(f"must be an object of at most {MAX_TEMPLATE_VARIABLES} variables")
    for item in value.values():
        if not (item is None or isinstance(item, bool | int | float | str)):
            raise InvalidParameter("its values must be strings, numbers, true, false or null")
        if isinstance(item, str) and len(item) > MAX_VARIABLE_CHARS:
            raise InvalidParameter(f"its strings may have {MAX_VARIABLE_CHARS} characters at most")
    return value


_STRING_OR_LIST = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_PROMPT_ITEM = {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}
_PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PROMPT_ITEM}]}
_PART_SCHEMA = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}

Prompt = Annotated[TextPrompts | IdPrompts, PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
Stop = Annotated[list[str], PlainValidator(_stops), WithJsonSchema(_STRING_OR_LIST)]
Content = Annotated[str, PlainValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)]
LogitBias = Annotated[dict[int, float], PlainValidator(_logit_bias), WithJsonSchema({"type": "object"})]
BadWords = Annotated[
    list[str], PlainValidator(_bad_words), WithJsonSchema({"type": "array", "items": {"type": "string"}})
]
TemplateVariables = Annotated[dict[str, Any], PlainValidator(_template_variables), WithJsonSchema({"type": "object"})]
Ids = Annotated[list[int], FailFast()]
Flag = bool | None


def _number(low: float, high: float, text: str) -> Any:
    return Field(default=None, ge=low, le=high, allow_inf_nan=False, description=text)


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)


class BodyWithUnknownFields(Body):
    """Keeps the fields that the schema does not name: `refuse_unsupported` looks for OpenAI's and vLLM's among them."""

    model_config = ConfigDict(extra="allow")

    def given(self) -> dict[str, object]:
        """Every field that the client sent, validated where the schema names it."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class StreamOptions(Body):
    include_usage: Flag = None
    continuous_usage_stats: Flag = None


class GenerationBody(BodyWithUnknownFields):
    """The fields that completions and chat completions share."""

    model: str | None = Field(None, description="May be absent: one model is served.")
    max_tokens: int | None = Field(None, ge=NO_LIMIT, le=MAX_TOKENS, description="New tokens at most; -1: no limit.")
    temperature: float | None = _number(0, 2, "0 is greedy. Default 0.6, as in Meta's reference, or the server's.")
    top_p: float | None = _number(0, 1, "0 is greedy. Default 0.9, or the server's.")
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS, description="0 or -1: no limit.")
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX, description="The same seed gives the same text.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description=f"prompts * n is at most {MAX_CHOICES}.")
    stop: Stop = Field(default_factory=list, description=f"Up to {MAX_STOPS} strings; never part of the answer.")
    stream: Flag = None
    stream_options: StreamOptions | None = None
    ignore_eos: Flag = Field(None, description="Generate up to max_tokens.")
    skip_special_tokens: Flag = Field(None, description="false: the text has the names of control tokens.")
    service_tier: str | None = Field(None, max_length=MAX_NAME_CHARS, description='Any; the answer says "default".')
    user: str | None = Field(
        None, description="Users share the server fairly; where API keys are configured, keys do instead."
    )
    priority: int | None = Field(None, ge=0, le=MAX_PRIORITY, description="0, the default, is served first.")
    presence_penalty: float | None = _number(-2, 2, "Lowers the logit of every token that the answer has.")
    frequency_penalty: float | None = _number(
        -2, 2, "Lowers a token's logit once for each time that the answer has it."
    )
    repetition_penalty: float | None = Field(
        None,
        gt=0,
        le=10,
        allow_inf_nan=False,
        description="Divides positive logits of tokens of prompt and answer. 1: none.",
    )
    min_p: float | None = _number(0, 1, "Leaves out tokens below this part of the most likely one's probability.")
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS, description="No end before so many tokens.")
    logit_bias: LogitBias = Field(default_factory=dict, description="Token id -> number from -100 to 100.")
    bad_words: BadWords = Field(default_factory=list, description="Words that are not generated.")
    stop_token_ids: Ids = Field(
        default_factory=list, max_length=MAX_STOP_TOKENS, description="Further ids that end the answer."
    )
    allowed_token_ids: Ids = Field(
        default_factory=list,
        max_length=MAX_ALLOWED_TOKENS,
        description="Only these and the ids that end an answer are sampled.",
    )

    response_format: dict[str, Any] | None = Field(
        None, description="text, json_object, json_schema (OpenAI's) or structural_tag (vLLM's)."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="vLLM's: one of json, regex, choice, grammar (Lark or GBNF), json_object, structural_tag."
    )
    guided_json: dict[str, Any] | str | bool | None = Field(None, description="As structured_outputs.json.")
    guided_regex: str | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: list[Any] | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="As structured_outputs.grammar.")
    grammar: str | None = Field(None, description="As structured_outputs.grammar.")
    json_schema: dict[str, Any] | None = Field(None, description="As structured_outputs.json.")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.min_tokens and self.max_tokens and 0 < self.max_tokens < self.min_tokens:
            raise InvalidParameter("min_tokens: must not be more than max_tokens", param="min_tokens")
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options: needs stream to be true", param="stream_options")
        return self


class CompletionBody(GenerationBody):
    prompt: Prompt
    echo: Flag = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(
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
            raise InvalidParameter("best_of: must not be less than n", param="best_of")
        if self.best_of is not None and self.best_of > n and self.stream:
            raise InvalidParameter(
                "best_of: a stream begins before the best is known: leave out stream, or send best_of equal to n",
                param="best_of",
            )
        if self.max_tokens == 0 and not self.echo:
            raise InvalidParameter(
                "max_tokens: 0 needs echo to be true: the answer is then the prompt", param="max_tokens"
            )
        if len(self.prompt) * self.num_sampled > MAX_CHOICES:
            name = "n" if self.num_sampled == n else "best_of"
            raise InvalidParameter(f"{name}: prompts * {name} must be at most {MAX_CHOICES}", param=name)
        return self


class ChatMessage(BodyWithUnknownFields):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = Field(description="May be null beside tool_calls.")
    name: str | None = Field(None, max_length=MAX_NAME_CHARS, description="For chat templates that write it.")
    tool_calls: ToolCalls = Field(default_factory=list, description="The calls of an earlier answer.")
    tool_call_id: str | None = Field(
        None, max_length=MAX_ID_CHARS, description="The call that a tool's message answers."
    )
    reasoning_content: str | None = Field(
        None, description="The reasoning of an earlier answer, for templates that read it."
    )

    @model_validator(mode="before")
    @classmethod
    def _with_calls(cls, given: Any) -> Any:
        """A message of calls may have no content; the older `function_call` becomes a call."""
        if not isinstance(given, dict) or given.get("role") != "assistant":
            return given
        if isinstance(function := given.get("function_call"), dict) and not given.get("tool_calls"):
            call = {"id": LEGACY_CALL_ID, "type": "function", "function": function}
            given = {**given, "tool_calls": [call], "function_call": None}
        has_parts = given.get("tool_calls") or given.get("reasoning_content")
        return {**given, "content": ""} if has_parts and given.get("content") is None else given

    @model_validator(mode="after")
    def _fits_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise InvalidParameter("tool_calls: only a message of the assistant has calls")
        if self.role == "tool" and not self.tool_call_id:
            raise InvalidParameter("tool_call_id: a message of a tool names the call that it answers")
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]


class DialogOptions(Body):
    """How a dialog becomes a prompt."""

    add_generation_prompt: Flag = Field(None, description="Default true: the prompt begins the assistant's message.")
    continue_final_message: Flag = Field(None, description="true: the answer goes on with the last message.")
    chat_template_kwargs: TemplateVariables = Field(
        default_factory=dict, description="Variables of the model's chat template, such as enable_thinking."
    )

    @property
    def chat_options(self) -> ChatOptions:
        continues = bool(self.continue_final_message)
        begins = not continues and self.add_generation_prompt is not False
        return ChatOptions(begins, continues, self.chat_template_kwargs)

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message: the prompt ends in the last message or behind it: leave one field out"
            raise InvalidParameter(message, param="continue_final_message")
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
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For chat templates that read it."
    )
    max_completion_tokens: int | None = Field(None, ge=NO_LIMIT, le=MAX_TOKENS, description="The same as max_tokens.")
    logprobs: Flag = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools in either form."""
        return self.tools or self.functions

    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None for plain text. Raises InvalidParameter."""
        if self.functions:
            return tool_use(self.functions, self.function_call, parallel=False)
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        if self.token_limit == 0:
            raise InvalidParameter("max_tokens: must be at least 1, or -1 for no limit", param="max_tokens")
        if self.max_tokens not in (None, self.token_limit):
            message = "max_tokens: contradicts max_completion_tokens; they are the same limit, send one of them"
            raise InvalidParameter(message, param="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("top_logprobs: needs logprobs to be true", param="top_logprobs")
        return self


class TokenizeBody(DialogOptions):
    """Either a text, or the messages of a chat, which are tokenized by the chat template."""

    model: str | None = None
    prompt: str | None = Field(None, max_length=MAX_TEXT_BYTES)
    messages: Messages = Field(default_factory=list)
    add_special_tokens: Flag = Field(None, description="Default true: BOS first.")
    parse_special: Flag = Field(None, description="true: names of control tokens in the prompt become those tokens.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise InvalidParameter("prompt: send either prompt or messages", param="prompt")
        if self.prompt is not None and len(self.prompt.encode()) > MAX_TEXT_BYTES:
            raise InvalidParameter(f"prompt: must have at most {MAX_TEXT_BYTES} bytes of UTF-8", param="prompt")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Ids = Field(max_length=2**20)
    skip_special_tokens: Flag = Field(None, description="false: the text has the names of control tokens.")


def _is(*neutral: object) -> Callable[[object], bool]:
    """Tests whether a value equals one of these and is of its type: JSON's false is not 0."""
    return lambda value: any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


_empty = _is([], {}, "", False)
_none_at_all = _is()

NEUTRAL: dict[str, Callable[[object], bool]] = {
    # field -> test for values that do not change the answer. Every other value is refused, never ignored.
    "length_penalty": _is(1), "typical_p": _is(1), "suffix": _is(""), "use_beam_search": _is(False),
    "modalities": _is(["text"]), "audio": _none_at_all, "prediction": _none_at_all,
    "verbosity": _is("medium"), "web_search_options": _none_at_all,
    "prompt_embeds": _none_at_all, "prompt_logprobs": _none_at_all, "truncate_prompt_tokens": _none_at_all,
    "logits_processors": _empty, "include_stop_str_in_output": _is(False), "chat_template": _none_at_all,
    "documents": _empty, "mirostat": _is(0), "dry_multiplier": _is(0), "xtc_probability": _is(0),
}  # fmt: skip
REASONS = {
    "suffix": "it continues texts, and has no format for text before and after a gap; write the model's own into the prompt",
    "use_beam_search": "every answer is sampled; n and best_of give several",
    "length_penalty": "it belongs to beam search",
    "chat_template": "the server's own argument chat_template sets it for all requests",
    "prompt_logprobs": "echo with logprobs gives the same",
    "truncate_prompt_tokens": "a prompt that does not fit is refused, never cut",
}
COMPLETION_NEUTRAL = NEUTRAL | {
    "tools": _empty, "tool_choice": _is("none"), "functions": _empty, "function_call": _is("none"),
    "reasoning_effort": _is("none"),
    "continue_final_message": _is(False), "add_generation_prompt": _is(True), "chat_template_kwargs": _empty
}  # fmt: skip
CHAT_NEUTRAL = NEUTRAL | {
    "echo": _is(False), "best_of": _is(1), "add_special_tokens": _is(False), "parse_special": _is(False)
}  # fmt: skip
MESSAGE_NEUTRAL = {"function_call": _none_at_all, "audio": _none_at_all}


def refuse_unsupported(
    fields: Mapping[str, object], neutral: Mapping[str, Callable[[object], bool]], where: str = ""
) -> None:
    """Raises Unsupported for the first field whose value this server does not support. `where` prefixes its name."""
    for name, value in fields.items():
        if value is not None and name in neutral and not neutral[name](value):
            why = REASONS.get(name, "docs/http.md lists the fields that are")
            raise Unsupported(f"{where}{name}: not supported by this server: {why}", param=where + name)
