"""Answers of chats. Those that are divided into reasoning, content and tool calls take `ParsedChatSerializer`."""

from collections.abc import Iterator, Sequence

from deployments.engine.interface import Engine
from deployments.engine.sequence_stream import Delta, SequenceStream
from deployments.openai.answers.completions import ChoicesSerializer, Part, encode
from deployments.openai.answers.logprobs import ChatLogprobs, Json, LogprobsWriter
from deployments.openai.answers.parsed_answer import ParsedAnswer
from deployments.openai.plan import Plan
from llama_core.scheduling.request import FinishReason
from llama_core.text.tools.pieces import Arguments, CallStart, Content, Piece, Reasoning


class ChatSerializer(ChoicesSerializer):
    id_prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _logprobs_writer(self, prompt: Sequence[int], num_top: int) -> LogprobsWriter:
        return ChatLogprobs(self._tokenizer, num_top, names_ids=self._plan.names_ids)

    def _chunk_fields(self, part: Part) -> bytes:
        """The role is sent with the first token, because benchmarks count a chunk with the role alone as the first token."""
        if part.is_first:
            return b'"delta":{"role":"assistant","content":' + encode(part.text) + b"}"
        return b'"delta":{"content":' + encode(part.text) + b"}" if part.text else b'"delta":{}'

    def _choice_fields(self, index: int, part: Part) -> bytes:
        return b'"message":' + encode({"role": "assistant", "content": part.text, "refusal": None})

    def _answer_fields(self) -> bytes:
        return self._first_event_fields() + (self._prompt_logprobs_field(0) if self._prompt_logprobs else b"")

    def _first_event_fields(self) -> bytes:
        return self._prompt_ids(0) if self._plan.returns_ids else b""


class ParsedChatSerializer(ChatSerializer):
    """Each piece of an answer is a chunk; the first has the role, and the last only the finish reason."""

    def __init__(self, engine: Engine, plan: Plan, streams: Sequence[SequenceStream]) -> None:
        super().__init__(engine, plan, streams)
        assert plan.parsing is not None, "the answer is divided"
        self._is_legacy = plan.parsing.is_legacy
        self._answers = [
            ParsedAnswer(plan.parsing, engine.tokenizer, prompt, params, index)
            for index, (prompt, params) in enumerate(plan.request.choices())
        ]
        self._have_role = [False] * plan.request.num_choices  # by choice

    def chunk(self, index: int, delta: Delta) -> bytes | Iterator[bytes]:
        part = self._part(index, delta)
        if not self._has_logprobs:
            return b"".join(self._events(index, part, iter(())))
        writer = self._prompt(index).writer
        logprobs = (writer.written([each]) for each in self._logprobs(index, delta, part.is_first))
        return self._events(index, part, logprobs)

    def usage(self) -> Json:
        usage = super().usage()
        if self._answers[0].counter is None:
            return usage
        num_tokens = sum(answer.num_reasoning for answer in self._answers)
        return {**usage, "completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def _part(self, index: int, delta: Delta) -> Part:
        if (counter := self._answers[index].counter) is not None:
            counter.push(delta.tokens)
        return super()._part(index, delta)

    def _events(self, index: int, part: Part, logprobs: Iterator[bytes]) -> Iterator[bytes]:
        """The chunks of one delta: its pieces, its log-probabilities beside them as far as they go, and its end."""
        is_last, ids = part.finish_reason is not None, part.ids
        pieces = self._answers[index].pieces(part.text, is_last=is_last)
        if is_last and not self._have_role[index] and not pieces:
            pieces = [Content("")]
        deltas = [self._with_role(index, self._delta(index, piece)) for piece in pieces]
        if not deltas and (ids or (not is_last and self._plan.continuous_usage)):
            deltas = [self._with_role(index, {}) if ids else {}]
        for fields in deltas:
            yield self._event(index, _delta(fields) + ids, next(logprobs, None), None)
            ids = b""
        for entries in logprobs:
            yield self._event(index, _delta(self._with_role(index, {})), entries, None)
        if is_last:
            yield self._event(index, _delta({}), None, self._finish_reason(index, part.finish_reason))

    def _with_role(self, index: int, delta: Json) -> Json:
        """The choice's first delta has the role."""
        if self._have_role[index]:
            return delta
        self._have_role[index] = True
        return {"role": "assistant", "content": None, **delta}

    def _delta(self, index: int, piece: Piece) -> Json:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            return _reasoning(piece.text)
        answer = self._answers[index]
        call: Json = {}
        if isinstance(piece, Arguments):
            function = {"arguments": piece.text}
        else:
            call, function = {"id": answer.new_call_id(), "type": "function"}, {"name": piece.name, "arguments": ""}
        if self._is_legacy:
            return {"function_call": function}
        return {"tool_calls": [{"index": answer.last_call, **call, "function": function}]}

    def _choice_fields(self, index: int, part: Part) -> bytes:
        """The whole answer's `message`."""
        contents, reasoning, calls = "", "", []
        for piece in self._answers[index].pieces(part.text, is_last=True):
            if isinstance(piece, CallStart):
                function: Json = {"name": piece.name, "arguments": ""}
                calls.append({"id": self._answers[index].new_call_id(), "type": "function", "function": function})
            elif isinstance(piece, Arguments):
                function["arguments"] = piece.text
            elif isinstance(piece, Reasoning):
                reasoning += piece.text
            else:
                contents += piece.text
        message: Json = {"role": "assistant", "content": None if calls and not contents else contents, "refusal": None}
        if reasoning:
            message |= _reasoning(reasoning)
        if calls:
            message |= {"function_call": calls[0]["function"]} if self._is_legacy else {"tool_calls": calls}
        return b'"message":' + encode(message)

    def _finish_reason(self, index: int, reason: FinishReason | None) -> str | None:
        if reason is not FinishReason.STOP or not self._answers[index].num_calls:
            return reason
        return "function_call" if self._is_legacy else "tool_calls"


def chat_serializer(engine: Engine, plan: Plan, streams: Sequence[SequenceStream]) -> ChatSerializer:
    """The serializer of a chat's answer."""
    return (ChatSerializer if plan.parsing is None else ParsedChatSerializer)(engine, plan, streams)


def _reasoning(text: str) -> Json:
    """Under DeepSeek's name, which most clients and the older vLLM have, and that of vLLM since 2026."""
    return {"reasoning_content": text, "reasoning": text}


def _delta(fields: Json) -> bytes:
    return b'"delta":' + encode(fields)
