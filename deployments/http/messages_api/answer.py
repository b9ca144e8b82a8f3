"""Writes answers as Anthropic's messages: a list of content blocks, whole or as a stream of named events."""

import json
from collections.abc import Sequence

import msgspec
from pydantic_core import from_json

from deployments.engine.interface import Engine
from deployments.engine.sequence_stream import Delta, SequenceStream
from deployments.openai.answers.answer import CollectedChoice, Sliced
from deployments.openai.answers.parsed_answer import SingleAnswer, named_event
from deployments.openai.errors import anthropic_error_object
from deployments.openai.plan import Plan
from llama_core.errors import LlamaError
from llama_core.scheduling.request import FinishReason
from llama_core.text.tools.pieces import Arguments, CallStart, Content, Piece, Reasoning

Fields = dict[str, object]


class MessagesSerializer:
    """Implements `AnswerSerializer`."""

    ping = named_event({"type": "ping"})

    def __init__(self, engine: Engine, plan: Plan, streams: Sequence[SequenceStream]) -> None:
        self._answer = SingleAnswer(engine, plan, streams)
        self._fits = self._answer.num_prompt + (plan.token_limit or 0) <= engine.max_seq_len
        self._head: Fields = {
            "id": f"msg_{plan.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": engine.model_id,
        }
        self._num_blocks = 0
        self._open: str = ""  # type of the block that further pieces may extend

    def opening(self) -> bytes:
        """`message_start`, whose usage counts no cached tokens, which are not known yet; that of `message_delta` does."""
        message: Fields = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        return named_event({"type": "message_start", "message": {**message, "usage": self._usage(num_cached=0)}})

    def chunk(self, index: int, delta: Delta) -> bytes:
        return b"".join(event for piece in self._answer.take(delta) for event in self._piece_events(piece))

    def end_of_stream(self) -> bytes:
        reason: Fields = {"stop_reason": self._stop_reason(), "stop_sequence": self._answer.stream.matched_stop}
        events = [
            *self._block_stop(),
            named_event(
                {"type": "message_delta", "delta": reason, "usage": self._usage(self._answer.stream.num_cached_tokens)}
            ),
        ]
        return b"".join([*events, named_event({"type": "message_stop"})])

    def failure(self, error: LlamaError, request_id: str) -> bytes:
        return named_event(anthropic_error_object(error, request_id))

    def whole(self, choices: Sequence[CollectedChoice]) -> Sliced[bytes]:
        yield
        blocks: list[Fields] = []
        for piece in self._answer.take(choices[0].joined()):
            if isinstance(piece, Arguments):
                blocks[-1]["input"] = _input(piece.text)
            elif isinstance(piece, CallStart):
                blocks.append(self._tool_use(piece))
            else:
                blocks.append(_text_block(piece, piece.text))
        reason: Fields = {"stop_reason": self._stop_reason(), "stop_sequence": self._answer.stream.matched_stop}
        return msgspec.json.encode(
            {**self._head, "content": blocks, **reason, "usage": self._usage(self._answer.stream.num_cached_tokens)}
        )

    def _piece_events(self, piece: Piece) -> list[bytes]:
        if isinstance(piece, Arguments):
            return [self._block_delta({"type": "input_json_delta", "partial_json": piece.text})]
        if isinstance(piece, CallStart):
            return self._block_start("tool_use", self._tool_use(piece))
        kind = "thinking" if isinstance(piece, Reasoning) else "text"
        opened = [] if self._open == kind else self._block_start(kind, _text_block(piece, ""))
        return [*opened, self._block_delta({"type": f"{kind}_delta", kind: piece.text})]

    def _tool_use(self, call: CallStart) -> Fields:
        return {"type": "tool_use", "id": self._answer.new_id("toolu_"), "name": call.name, "input": {}}

    def _block_start(self, kind: str, block: Fields) -> list[bytes]:
        events = self._block_stop()
        self._open, self._num_blocks = kind, self._num_blocks + 1
        index = self._num_blocks - 1
        return [*events, named_event({"type": "content_block_start", "index": index, "content_block": block})]

    def _block_delta(self, delta: Fields) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta})

    def _block_stop(self) -> list[bytes]:
        if not self._open:
            return []
        self._open = ""
        return [named_event({"type": "content_block_stop", "index": self._num_blocks - 1})]

    def _stop_reason(self) -> str:
        if self._answer.finish_reason is FinishReason.LENGTH:
            return "max_tokens" if self._fits else "model_context_window_exceeded"
        if self._answer.stream.matched_stop is not None:
            return "stop_sequence"
        return "tool_use" if self._answer.num_calls else "end_turn"

    def _usage(self, num_cached: int) -> Fields:
        """Tokens so far. Those of the prompt that were cached are not among `input_tokens`."""
        answer = self._answer
        usage: Fields = {
            "input_tokens": answer.num_prompt - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": answer.num_generated,
        }
        if answer.num_reasoning:
            usage["output_tokens_details"] = {"thinking_tokens": answer.num_reasoning}
        return usage


def _input(arguments: str) -> msgspec.Raw:
    """Arguments as JSON; of those that were cut off, the part that is complete."""
    try:
        json.loads(arguments)
    except ValueError:
        arguments = json.dumps(from_json(arguments, allow_partial=True) if arguments else {})
    return msgspec.Raw(arguments.encode())


def _text_block(piece: Content | Reasoning, text: str) -> Fields:
    if isinstance(piece, Reasoning):
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}
