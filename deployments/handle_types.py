"""What calls by Serve handle take and give, beside the reference's dictionaries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from deployments.openai.schemas import ChatBody
from deployments.openai.validation import validate
from llama_core.scheduling.request import TokenLogprob
from llama_core.text.chat_format import Dialog
from llama_core.text.tools.tool import Tool

_OF_THE_CALL = ("request_id", "owner", "priority", "skip_special_tokens", "timeout_s")
Prompt = str | Sequence[int] | Dialog
Continuation = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The continuation of one prompt, or a part of it in a stream.

    finish_reason: "stop", "length" or "abort"; None in every part of a stream but the last. logprobs: one for each of `tokens`
    where `SamplingParams.logprobs` asks for them. prompt_logprobs: one for each token of the prompt but the first, where
    `SamplingParams.prompt_logprobs` asks for them; in a stream in the first part.
    """

    text: str
    tokens: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprob]
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Score:
    """The log-likelihood of one continuation: the sum of `token_logprobs` (natural logarithms), one for each of `tokens`.

    is_greedy: whether greedy decoding would have written it.
    """

    score: float
    tokens: list[int]
    token_logprobs: list[float]
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON text of an object, which follows the tool's schema unless the answer was cut off."""

    id: str
    name: str
    arguments: str

    def result(self, content: str) -> dict[str, Any]:
        """The message with the call's result, for the next turn."""
        return {"role": "tool", "tool_call_id": self.id, "content": content}


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A part of the answer's call number `index`, from 0 on. id, name: in its first part only."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatPart:
    """What a stream has gained. finish_reason, num_prompt_tokens and so on: as in `ChatAnswer`; None before the last part.
    prompt_logprobs: in the first part."""

    content: str
    reasoning: str
    tool_calls: list[ToolCallPart]
    finish_reason: str | None
    tokens: list[int]
    logprobs: list[TokenLogprob]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """finish_reason: "stop", "tool_calls", "length" or "abort". logprobs: one for each of `tokens`, of which the reasoning
    and the calls are part, where `SamplingParams.logprobs` asks for them. prompt_logprobs: one for each token of the prompt but
    the first, where `SamplingParams.prompt_logprobs` asks for them."""

    content: str
    reasoning: str
    tool_calls: list[ToolCall]
    finish_reason: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """The assistant's message, for the next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a chat asks for beside its sampling parameters; the fields are those of /v1/chat/completions.

    messages: OpenAI's objects. tools: OpenAI's objects, or `Tool`. response_format, structured_outputs: as over HTTP.
    stop, bad_words, skip_special_tokens, timeout_s, request_id, owner, priority: as of `sample`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool | Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    stop: Sequence[str] = ()
    request_id: str = ""
    owner: str = ""
    priority: int = 0
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True
    timeout_s: float | None = None

    def body(self) -> ChatBody:
        """The fields, checked. Raises InvalidParameter or InvalidDialog that names one."""
        names = [each.name for each in fields(self) if each.name not in _OF_THE_CALL]
        return validate(ChatBody, {name: _plain(getattr(self, name)) for name in names})


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Tool):
        described = value.described()
        return {**described, "function": {**described["function"], "strict": value.strict}}
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def joined(parts: Sequence[Sampled]) -> Sampled:
    """The result that all parts of a stream make."""
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        tokens=[token for part in parts for token in part.tokens],
        logprobs=[entry for part in parts for entry in part.logprobs],
        prompt_logprobs=parts[0].prompt_logprobs,
    )


def whole(parts: Sequence[ChatPart]) -> ChatAnswer:
    """The answer that all parts of a stream make."""
    calls: list[ToolCall] = []
    for each in (call for part in parts for call in part.tool_calls):
        if each.index == len(calls):
            calls.append(ToolCall(each.id, each.name, each.arguments))
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + each.arguments)
    last = parts[-1]
    assert last.finish_reason is not None, "the last part has the finish reason"
    return ChatAnswer(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        calls,
        last.finish_reason,
        [token for part in parts for token in part.tokens],
        [entry for part in parts for entry in part.logprobs],
        last.num_prompt_tokens,
        last.num_cached_tokens,
        last.num_reasoning_tokens,
        parts[0].prompt_logprobs,
    )
