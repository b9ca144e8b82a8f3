"""Writes answers as OpenAI's two routes do: whole ones, and the chunks of a stream.

A whole answer is made of the same parts as a stream's chunks, only collected. Chunks are the hot path (one a token a
stream), so what does not change is encoded once.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

import msgspec

from deployments.engine.interface import Delta, Engine, TokenStream
from deployments.http.logprobs import ChatLogprobs, CompletionLogprobs, Json
from deployments.http.plan import Plan
from llama_core.scheduling.request import FinishReason, TokenLogprob

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
TEXT_MARK = "\x1f"  # stands for a text while the bytes around it are made


class Part(NamedTuple):
    """What a delta adds to one choice of the answer."""

    text: str
    logprobs: Json | None
    finish_reason: FinishReason | None
    is_first: bool


@lru_cache(maxsize=1)
def _fingerprint(model_id: str) -> str:
    return f"fp_{uuid.uuid5(uuid.NAMESPACE_URL, model_id).hex[:10]}"


def event(content: object) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


class ResponseSerializer(ABC):
    """One request's answer. Feed it either through `chunk`, delta by delta, or `whole`, once."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, engine: Engine, plan: Plan, streams: Sequence[TokenStream]) -> None:
        self._plan = plan
        self._streams = streams
        self._tokenizer = engine.tokenizer
        self._begun = [False] * plan.num_choices
        self._num_generated = 0
        self._head: Json = {
            "id": self.id_prefix + uuid.uuid4().hex,
            "object": self.object_name,
            "created": int(time.time()),
            "model": engine.model_id,
            "system_fingerprint": _fingerprint(engine.model_id),
        }
        chunk_head = _encode({**self._head, "object": self.chunk_name})
        self._chunk_head = b"data: " + chunk_head[:-1] + b',"choices":[{"index":'
        self._logprobs = [self._logprob_writer(stream.prompt_tokens) for stream in streams]
        # By choice, once it has begun: what stands before and behind the text of every chunk but the last. It is the hot path.
        self._around_text: list[tuple[bytes, bytes] | None] = [None] * plan.num_choices
        self._only_text_varies = plan.params[0].logprobs is None and not plan.continuous_usage

    def chunk(self, index: int, delta: Delta) -> bytes:
        """One event; b"" when the delta says nothing to the client yet."""
        around = self._around_text[index]
        if around is not None and delta.finish_reason is None:
            self._num_generated += len(delta.tokens)
            return around[0] + _encode(delta.text) + around[1] if delta.text else b""
        part = self._part(index, delta)
        if self._only_text_varies and self._owes_nothing(index):
            chunk = self._written(index, Part(TEXT_MARK, None, None, is_first=False))
            head, _, tail = chunk.rpartition(_encode(TEXT_MARK))
            self._around_text[index] = head, tail
        return self._written(index, part)

    def _written(self, index: int, part: Part) -> bytes:
        says_something = (
            part.text or part.is_first or part.logprobs or part.finish_reason or self._plan.continuous_usage
        )
        if not says_something:
            return b""
        logprobs = b"null" if part.logprobs is None else _encode(part.logprobs)
        finish = b"null" if part.finish_reason is None else _encode(part.finish_reason)
        pieces = [self._chunk_head, b"%d," % index, self._chunk_fields(part), b',"logprobs":', logprobs]
        pieces += [b',"finish_reason":', finish, b"}]"]
        if self._plan.continuous_usage:
            pieces += [b',"usage":', _encode(self.usage())]
        elif self._plan.include_usage:
            pieces.append(b',"usage":null')
        pieces.append(b"}\n\n")
        return b"".join(pieces)

    def ending(self) -> bytes:
        """What follows the last choice's last chunk."""
        if not self._plan.include_usage:
            return DONE
        return event({**self._head, "object": self.chunk_name, "choices": [], "usage": self.usage()}) + DONE

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> Json:
        """The answer that a stream of these deltas (by choice) adds up to."""
        choices = [self._choice(index, self._part(index, _joined(parts))) for index, parts in enumerate(deltas)]
        return {**self._head, "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        """Tokens so far. A prompt counts once, however many choices it has."""
        num_prompt = sum(len(prompt) for prompt in self._plan.prompts)
        num_cached = sum(stream.num_cached_tokens for stream in self._streams[:: self._plan.n])
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _part(self, index: int, delta: Delta) -> Part:
        is_first, self._begun[index] = not self._begun[index], True
        self._num_generated += len(delta.tokens)
        text, tokens = self._text(index, delta, is_first), delta.tokens
        logprobs: Sequence[TokenLogprob | None] = delta.logprobs
        stream = self._streams[index]
        if is_first and self._plan.echo:
            tokens = stream.prompt_tokens + tokens
            logprobs = [None, *stream.prompt_logprobs, *logprobs]
        writer = self._logprobs[index]
        written = None if writer is None or not tokens else writer.take(tokens, logprobs)
        return Part(text, written, delta.finish_reason, is_first)

    def _text(self, index: int, delta: Delta, is_first: bool) -> str:
        return delta.text

    def _owes_nothing(self, index: int) -> bool:
        """Whether the text of the choice's next deltas goes out as it is."""
        return True

    @abstractmethod
    def _logprob_writer(self, prompt: Sequence[int]) -> CompletionLogprobs | ChatLogprobs | None: ...
    @abstractmethod
    def _chunk_fields(self, part: Part) -> bytes: ...
    @abstractmethod
    def _choice(self, index: int, part: Part) -> Json: ...


class ChatSerializer(ResponseSerializer):
    id_prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _logprob_writer(self, prompt: Sequence[int]) -> ChatLogprobs | None:
        num_top = self._plan.params[0].logprobs
        return None if num_top is None else ChatLogprobs(self._tokenizer, num_top)

    def _chunk_fields(self, part: Part) -> bytes:
        """The role comes with the first token: a chunk of its own would look like one to whoever times the first token."""
        if part.is_first:
            return b'"delta":{"role":"assistant","content":' + _encode(part.text) + b"}"
        return b'"delta":{"content":' + _encode(part.text) + b"}" if part.text else b'"delta":{}'

    def _choice(self, index: int, part: Part) -> Json:
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": part.logprobs, "finish_reason": part.finish_reason}


class CompletionSerializer(ResponseSerializer):
    id_prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def __init__(self, engine: Engine, plan: Plan, streams: Sequence[TokenStream]) -> None:
        super().__init__(engine, plan, streams)
        self._space: list[str | None] = [None] * plan.num_choices  # owed before a choice's text; None: not known yet

    def _text(self, index: int, delta: Delta, is_first: bool) -> str:
        """A completion goes on where its prompt ends, so a first token's leading space, which decoding drops, is part of it."""
        prompt, text = self._streams[index].prompt_tokens, delta.text
        if delta.tokens and self._space[index] is None:
            self._space[index] = " " if self._continues_with_space(prompt, delta.tokens[0]) else ""
        if text:
            text, self._space[index] = (self._space[index] or "") + text, ""
        return self._tokenizer.decode(prompt) + text if is_first and self._plan.echo else text

    def _owes_nothing(self, index: int) -> bool:
        return self._space[index] == ""

    def _continues_with_space(self, prompt: Sequence[int], token: int) -> bool:
        tokenizer = self._tokenizer
        drops = tokenizer.leading_space != "keep" and tokenizer.leads_with_space(token)
        return drops and not all(tokenizer.is_control(token_id) for token_id in prompt)

    def _logprob_writer(self, prompt: Sequence[int]) -> CompletionLogprobs | None:
        num_top = self._plan.params[0].logprobs
        before = [] if self._plan.echo else prompt
        return None if num_top is None else CompletionLogprobs(self._tokenizer, num_top, before)

    def _chunk_fields(self, part: Part) -> bytes:
        return b'"text":' + _encode(part.text)

    def _choice(self, index: int, part: Part) -> Json:
        return {"index": index, "text": part.text, "logprobs": part.logprobs, "finish_reason": part.finish_reason}


def _joined(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        text="".join(delta.text for delta in deltas),
        tokens=[token for delta in deltas for token in delta.tokens],
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        finish_reason=deltas[-1].finish_reason,
    )
