"""Answers of chats whose text is divided into reasoning, content and tool calls. Other answers take `ChatSerializer`."""

import hashlib
from collections.abc import Iterator, Sequence

from deployments.engine.interface import Delta, Engine, TokenStream
from deployments.openai.answers.completions import Part, ResponseSerializer, encode
from deployments.openai.answers.logprobs import Json
from deployments.openai.answers.openai_answers import ChatSerializer
from deployments.openai.plan import AnswerParsing, Plan
from llama_core.scheduling.request import FinishReason
from llama_core.text.reasoning import ReasoningCounter
from llama_core.text.tokenizers.tokenizer import Tokenizer
from llama_core.text.tools.pieces import Arguments, CallStart, Content, Piece, Reasoning, joined

ID_BYTES = 12  # of a call's id, written as hexadecimal digits


def chat_serializer(engine: Engine, plan: Plan, streams: Sequence[TokenStream]) -> ResponseSerializer:
    """The serializer of a chat's answer."""
    if plan.parsing is None:
        return ChatSerializer(engine, plan, streams)
    return ParsedChatSerializer(engine, plan, streams, plan.parsing)


class ParsedChatSerializer(ChatSerializer):
    """Each piece of an answer is a chunk; the first has the role, and the last only the finish reason."""

    def __init__(self, engine: Engine, plan: Plan, streams: Sequence[TokenStream], parsing: AnswerParsing) -> None:
        super().__init__(engine, plan, streams)
        self._choices = [
            _ParsedChoice(parsing, engine.tokenizer, call_id_seed(params.seed, index, prompt))
            for index, (prompt, params) in enumerate(plan.request.choices())
        ]

    def chunk(self, index: int, delta: Delta) -> bytes:
        part = self._part(index, delta)
        return b"".join(self._events(index, part, iter(())))

    def chunks(self, index: int, delta: Delta) -> Iterator[bytes]:
        part = self._part(index, delta)
        shared = self._prompt(index)
        logprobs = (shared.logprobs_object([each]) for each in self._logprobs(index, delta, part.is_first))
        return self._events(index, part, logprobs)

    def usage(self) -> Json:
        usage = super().usage()
        if self._choices[0].counter is None:
            return usage
        num_tokens = sum(choice.num_reasoning_tokens for choice in self._choices)
        return {**usage, "completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def _part(self, index: int, delta: Delta) -> Part:
        if (counter := self._choices[index].counter) is not None:
            counter.push(delta.tokens)
        return super()._part(index, delta)

    def _events(self, index: int, part: Part, logprobs: Iterator[bytes]) -> Iterator[bytes]:
        """The chunks of one delta: its pieces, its log-probabilities beside them as far as they go, and its end."""
        choice = self._choices[index]
        deltas = choice.deltas(part.text, is_last=part.finish_reason is not None)
        if not deltas and (part.ids or (part.finish_reason is None and self._plan.continuous_usage)):
            deltas = [choice.with_role({}) if part.ids else {}]
        ids = part.ids
        for fields in deltas:
            yield self._event(index, _delta(fields) + ids, next(logprobs, None), None)
            ids = b""
        for entries in logprobs:
            yield self._event(index, _delta(choice.with_role({})), entries, None)
        if part.finish_reason is not None:
            reason = self._finish_reason(index, part.finish_reason)
            yield self._event(index, _delta({}), None, reason)

    def _choice_fields(self, index: int, part: Part) -> bytes:
        return b'"message":' + encode(self._choices[index].message(part.text))

    def _finish_reason(self, index: int, reason: FinishReason | None) -> str | None:
        return self._choices[index].call_reason if reason is FinishReason.STOP else reason


class _ParsedChoice:
    """One choice's reader, and the ids of its calls: equal when the same request is sent again."""

    def __init__(self, parsing: AnswerParsing, tokenizer: Tokenizer, id_seed: bytes) -> None:
        self._reader = parsing.reader()
        self._is_legacy = parsing.is_legacy
        self._hides_reasoning = parsing.hides_reasoning
        self._id_seed = id_seed
        self._num_calls = 0
        self._has_role = False
        marks = parsing.answer_format.reasoning
        self.counter = None if marks is None else ReasoningCounter(marks, tokenizer, begun=parsing.begun)

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self.counter is None else self.counter.num_tokens

    @property
    def call_reason(self) -> str:
        """The finish reason of an answer that has ended by itself."""
        if not self._num_calls:
            return FinishReason.STOP
        return "function_call" if self._is_legacy else "tool_calls"

    def deltas(self, text: str, *, is_last: bool) -> list[Json]:
        """The `delta` objects of more text."""
        pieces = joined(self._pieces(text, is_last))
        if is_last and not self._has_role and not pieces:
            pieces = [Content("")]
        return [self.with_role(self._delta(piece)) for piece in pieces]

    def with_role(self, delta: Json) -> Json:
        """The choice's first delta has the role."""
        if self._has_role:
            return delta
        self._has_role = True
        return {"role": "assistant", "content": None, **delta}

    def message(self, text: str) -> Json:
        """The whole answer's `message`."""
        contents, reasoning, calls = "", "", []
        for piece in joined(self._pieces(text, is_last=True)):
            if isinstance(piece, CallStart):
                call_id, self._num_calls = self._call_id(), self._num_calls + 1
                calls.append({"id": call_id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
            elif isinstance(piece, Arguments):
                calls[-1]["function"] = {**calls[-1]["function"], "arguments": piece.text}  # type: ignore[dict-item]
            elif isinstance(piece, Reasoning):
                reasoning += piece.text
            else:
                contents += piece.text
        message: Json = {"role": "assistant", "content": None if calls and not contents else contents, "refusal": None}
        if reasoning:
            message |= _reasoning(reasoning)
        if calls:
            message |= {"function_call": calls[0]["function"]} if self._is_legacy else {"tool_calls": calls}
        return message

    def _pieces(self, text: str, is_last: bool) -> list[Piece]:
        pieces = self._reader.push(text) if text else []
        if is_last:
            pieces = [*pieces, *self._reader.finish()]
        if self._hides_reasoning:
            return [piece for piece in pieces if not isinstance(piece, Reasoning)]
        return pieces

    def _delta(self, piece: Piece) -> Json:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            return _reasoning(piece.text)
        if isinstance(piece, Arguments):
            return self._call_delta({}, {"arguments": piece.text})
        call_id, self._num_calls = self._call_id(), self._num_calls + 1
        return self._call_delta({"id": call_id, "type": "function"}, {"name": piece.name, "arguments": ""})

    def _call_delta(self, call: Json, function: Json) -> Json:
        if self._is_legacy:
            return {"function_call": function}
        return {"tool_calls": [{"index": self._num_calls - 1, **call, "function": function}]}

    def _call_id(self) -> str:
        return call_id(self._id_seed, self._num_calls)


def _reasoning(text: str) -> Json:
    """Under DeepSeek's name, which most clients and the older vLLM have, and that of vLLM since 2026."""
    return {"reasoning_content": text, "reasoning": text}


def _delta(fields: Json) -> bytes:
    return b'"delta":' + encode(fields)


def call_id_seed(seed: int, index: int, prompt: Sequence[int]) -> bytes:
    """Differs between the turns of a conversation, whose calls must not share an id even if all turns have one seed."""
    digest = hashlib.blake2b(b"".join(token.to_bytes(4, "little") for token in prompt), digest_size=16)
    return b"%d %d %s " % (seed, index, digest.digest())


def call_id(id_seed: bytes, number: int) -> str:
    """The id of a choice's call with this number, from 0 on."""
    digest = hashlib.blake2b(id_seed + b"%d" % number, digest_size=ID_BYTES)
    return f"call_{digest.hexdigest()}"
