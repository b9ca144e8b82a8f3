"""The answers of chats by handle, whole and in parts: text, reasoning and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.engine.interface import Delta, Engine, TokenStream
from deployments.http.answer_ending import AnswerEnding
from deployments.http.parsed_chat import call_id, call_id_seed
from deployments.http.plan import Plan
from deployments.http.single_answer import SingleAnswer
from llama_core.scheduling.request import TokenLogprob
from llama_core.text.tools.pieces import Arguments, CallStart, Content, Piece, Reasoning


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


class ChatReader:
    """Reads the deltas of one answer."""

    def __init__(self, engine: Engine, plan: Plan, stream: TokenStream) -> None:
        """plan: of one prompt with one choice."""
        self._answer = SingleAnswer(engine, plan, [stream])
        self._ending = AnswerEnding(plan.answer_ending) if plan.answer_ending else None
        self._stream = stream
        self._id_seed = call_id_seed(plan.params[0].seed, 0, plan.prompts[0])
        self._has_prompt_logprobs = plan.params[0].prompt_logprobs  # which no part has had

    def part(self, delta: Delta) -> ChatPart:
        answer, num_calls = self._answer, self._answer.num_calls
        shown = delta if self._ending is None else self._ending.without(delta, self._stream)
        pieces = answer.take(shown)
        of_prompt = list(self._stream.prompt_logprobs) if self._has_prompt_logprobs else []
        self._has_prompt_logprobs = False
        return ChatPart(
            "".join(piece.text for piece in pieces if isinstance(piece, Content)),
            "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
            self._calls(pieces, num_calls),
            self._finish_reason(delta),
            delta.tokens,
            list(delta.logprobs),
            answer.num_prompt,
            answer.num_cached,
            answer.num_reasoning,
            of_prompt,
        )

    def _calls(self, pieces: Sequence[Piece], num_calls: int) -> list[ToolCallPart]:
        """num_calls: before these pieces."""
        calls: list[ToolCallPart] = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                calls.append(ToolCallPart(num_calls, call_id(self._id_seed, num_calls), piece.name, ""))
                num_calls += 1
            elif isinstance(piece, Arguments):
                calls.append(ToolCallPart(num_calls - 1, "", "", piece.text))
        return calls

    def _finish_reason(self, delta: Delta) -> str | None:
        if delta.finish_reason is None:
            return None
        return "tool_calls" if delta.finish_reason == "stop" and self._answer.num_calls else delta.finish_reason.value


def whole(parts: Sequence[ChatPart]) -> ChatAnswer:
    """The answer that all parts of a stream make."""
    calls: list[ToolCall] = []
    for each in (call for part in parts for call in part.tool_calls):
        if each.index == len(calls):
            calls.append(ToolCall(each.id, each.name, each.arguments))
        else:
            begun = calls[-1]
            calls[-1] = ToolCall(begun.id, begun.name, begun.arguments + each.arguments)
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
