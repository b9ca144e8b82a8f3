"""Writes whole answers and the chunks of streams in the formats of OpenAI's two older routes: completions, and what chats
(`chats.py`) share with them.

Chunks without log-probabilities are the hot path (one a token a stream), so their constant parts are encoded once. Answers
with log-probabilities can be megabytes: they are written in slices, and the part that the choices of one prompt
share is written once.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

import msgspec

from deployments.engine.interface import Engine
from deployments.engine.sequence_stream import Delta, SequenceStream
from deployments.openai.answers.answer import PING, CollectedChoice, LeadingSpace, Sliced
from deployments.openai.answers.logprobs import (
    CompletionLogprobs,
    Fragments,
    Json,
    LogprobsWriter,
    PromptLogprobs,
    PromptShare,
)
from deployments.openai.errors import error_object
from deployments.openai.plan import Plan
from llama_core.errors import LlamaError
from llama_core.scheduling.request import FinishReason

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
TEXT_MARK = "\x1f"  # placeholder of the text while the bytes around it are encoded


class Part(NamedTuple):
    """The part of one choice's answer that a delta adds. logprobs: a JSON object. ids: the choice's fields with token ids, as
    JSON with a comma before each; empty where the request asks for none."""

    text: str
    logprobs: bytes | None
    finish_reason: FinishReason | None
    is_first: bool
    ids: bytes = b""


@lru_cache(maxsize=1)
def _fingerprint(model_id: str) -> str:
    return f"fp_{uuid.uuid5(uuid.NAMESPACE_URL, model_id).hex[:10]}"


def event(content: object) -> bytes:
    return b"data: " + encode(content) + b"\n\n"


def usage_of(plan: Plan, streams: Sequence[SequenceStream], num_generated: int) -> Json:
    """Tokens so far. A prompt counts once, however many choices it has."""
    num_prompt = sum(len(prompt) for prompt in plan.request.prompts)
    num_cached = sum(stream.num_cached_tokens for stream in streams[:: plan.request.n])
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class ChoicesSerializer(ABC):
    """The `AnswerSerializer` of an answer with any number of choices, each of one text."""

    ping = PING

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, engine: Engine, plan: Plan, streams: Sequence[SequenceStream]) -> None:
        self._plan = plan
        self._streams = streams
        self._tokenizer = engine.tokenizer
        self._begun = [False] * plan.request.num_choices
        self._num_generated = 0
        self._head: Json = {
            "id": self.id_prefix + plan.answer_id,
            "object": self.object_name,
            "created": int(time.time()),
            "model": engine.model_id,
            "system_fingerprint": _fingerprint(engine.model_id),
        }
        if plan.names_service_tier:
            self._head["service_tier"] = "default"
        chunk_head = encode({**self._head, "object": self.chunk_name})
        self._chunk_head = b"data: " + chunk_head[:-1] + b',"choices":[{"index":'
        self._has_logprobs = plan.num_top is not None
        self._prompts, self._prompt_logprobs, self._spaces = [], [], []
        for prompt in plan.request.prompts:
            writer = None if plan.num_top is None else self._logprobs_writer(prompt, plan.num_top)
            self._prompts.append(PromptShare(engine.tokenizer, prompt, plan.request.skip_special_tokens, writer))
            if plan.num_prompt_top is not None:
                self._prompt_logprobs.append(PromptLogprobs(engine.tokenizer, prompt, plan.num_prompt_top))
            for _ in range(plan.request.n):
                space = LeadingSpace(engine.tokenizer, prompt, continues_prompt=plan.continues_prompt)
                self._spaces.append(space)
        self._writers: list[LogprobsWriter | None] = [None] * plan.request.num_choices  # by choice, once it has begun
        # By choice, once it has begun: the bytes before and after the text in every chunk but the last. The hot path.
        self._around_text: list[tuple[bytes, bytes] | None] = [None] * plan.request.num_choices
        self._only_text_varies = not self._has_logprobs and not plan.continuous_usage and not plan.returns_ids
        # Fields of the answer that its first event has, as JSON with a comma before each.
        self._first_fields = self._first_event_fields()

    def opening(self) -> bytes:
        """Nothing: benchmarks count the first chunk as the first token."""
        return b""

    def chunk(self, index: int, delta: Delta) -> bytes | Iterator[bytes]:
        """The event of a delta; b"" if the delta has no text for the client yet."""
        around = self._around_text[index]
        if around is not None and delta.finish_reason is None:
            self._num_generated += len(delta.tokens)
            return around[0] + encode(delta.text) + around[1] if delta.text else b""
        delta = self._shown(delta)
        part = self._part(index, delta)
        if self._has_logprobs:
            return self._chunks(index, delta, part)
        if delta.finish_reason is None and self._only_text_varies and self._spaces[index].is_written:
            chunk = self._written(index, Part(TEXT_MARK, None, None, is_first=False))
            head, _, tail = chunk.rpartition(encode(TEXT_MARK))
            self._around_text[index] = head, tail
        return self._written(index, part)

    def _chunks(self, index: int, delta: Delta, part: Part) -> Iterator[bytes]:
        """The events of a delta with log-probabilities, each made of one slice. The first has the text."""
        last = None
        for fragments in self._logprobs(index, delta, part.is_first):
            if last is not None:
                yield self._written(index, part._replace(logprobs=last, finish_reason=None))
                part = Part("", None, part.finish_reason, is_first=False)
            last = self._prompt(index).writer.written([fragments])
        yield self._written(index, part._replace(logprobs=last))

    def _written(self, index: int, part: Part) -> bytes:
        says_something = part.text or part.is_first or part.logprobs or part.finish_reason or part.ids
        if not says_something and not self._plan.continuous_usage:
            return b""
        return self._event(index, self._chunk_fields(part) + part.ids, part.logprobs, part.finish_reason)

    def _event(self, index: int, fields: bytes, logprobs: bytes | None, finish_reason: str | None) -> bytes:
        """A chunk of one choice. fields: of the choice, as JSON without braces."""
        pieces = [self._chunk_head, b"%d," % index, fields, self._choice_end(index, logprobs, finish_reason), b"]"]
        if self._plan.continuous_usage:
            pieces += [b',"usage":', encode(self.usage())]
        elif self._plan.include_usage:
            pieces.append(b',"usage":null')
        pieces += [self._first_fields, b"}\n\n"]
        self._first_fields = b""
        return b"".join(pieces)

    def end_of_stream(self) -> bytes:
        """The events after the last choice's last chunk."""
        if not self._plan.include_usage:
            return DONE
        return event({**self._head, "object": self.chunk_name, "choices": [], "usage": self.usage()}) + DONE

    def failure(self, error: LlamaError, request_id: str) -> bytes:
        """The last event of a stream that fails: a chunk with `error`."""
        return event(error_object(error))

    def whole(self, choices: Sequence[CollectedChoice]) -> Sliced[bytes]:
        """The answer as JSON, made in slices."""
        written: list[bytes] = []
        returned = self._returned(choices)
        for number, prompt_logprobs in enumerate(self._prompt_logprobs):
            yield from prompt_logprobs.slices(self._streams[number * self._plan.request.n].prompt_logprobs)
        for number, index in enumerate(returned):
            if number:
                yield
            delta = self._shown(choices[index].joined())
            part = self._part(index, delta)
            fragments: list[Fragments] = []
            if self._has_logprobs:
                for taken in self._logprobs(index, delta, part.is_first):
                    fragments.append(taken)
                    yield
            if fragments:
                part = part._replace(logprobs=self._prompt(index).writer.written(fragments))
            fields = self._choice_fields(index, part) + part.ids
            reason = self._finish_reason(index, part.finish_reason)
            written.append(b'{"index":%d,' % number + fields + self._choice_end(index, part.logprobs, reason))
        for index in set(range(len(choices))).difference(returned):
            self._num_generated += choices[index].num_tokens
        body = [encode(self._head)[:-1], b',"choices":[', b",".join(written), b'],"usage":', encode(self.usage())]
        return b"".join([*body, self._answer_fields(), b"}"])

    def _answer_fields(self) -> bytes:
        """Further fields of a whole answer, each with a comma before it."""
        return b""

    def _first_event_fields(self) -> bytes:
        """Further fields of a stream's first event, each with a comma before it."""
        return b""

    def _prompt_ids(self, index: int) -> bytes:
        """The ids of a choice's prompt as a field with a comma before it."""
        return b',"prompt_token_ids":' + encode(self._plan.request.prompts[index // self._plan.request.n])

    def _prompt_logprobs_field(self, index: int) -> bytes:
        """Those of a choice's prompt, as a field with a comma before it."""
        return b',"prompt_logprobs":' + self._prompt_logprobs[index // self._plan.request.n].written

    def _ids(self, index: int, delta: Delta, is_first: bool) -> bytes:
        """The choice's fields with token ids that a delta adds, each with a comma before it."""
        return b',"token_ids":' + encode(delta.tokens)

    def _finish_reason(self, index: int, reason: FinishReason | None) -> str | None:
        return reason

    def _choice_end(self, index: int, logprobs: bytes | None, finish_reason: str | None) -> bytes:
        """The last fields of a choice, with its brace. `stop_reason` is vLLM's, of a choice that has ended."""
        end = b',"logprobs":%s,"finish_reason":%s' % (logprobs or b"null", encode(finish_reason))
        if finish_reason is None:
            return end + b"}"
        found = None if finish_reason == FinishReason.LENGTH else self._streams[index].stop_reason
        return end + b',"stop_reason":%s}' % encode(found)

    def _returned(self, choices: Sequence[CollectedChoice]) -> list[int]:
        """The choices of the answer: all, or each prompt's best ones, the best first."""
        plan = self._plan
        if not plan.num_returned:
            return list(range(len(choices)))
        returned: list[int] = []
        for first in range(0, len(choices), plan.request.n):
            ranked = sorted(range(first, first + plan.request.n), key=lambda index: -choices[index].mean_logprob())
            returned += ranked[: plan.num_returned]
        return returned

    def usage(self) -> Json:
        return usage_of(self._plan, self._streams, self._num_generated)

    def _shown(self, delta: Delta) -> Delta:
        """What the answer shows of a delta: none of its tokens where the request asks for the prompt alone."""
        if self._plan.token_limit != 0:
            return delta
        return Delta("", [], [], None if delta.finish_reason is None else FinishReason.LENGTH)

    def _part(self, index: int, delta: Delta) -> Part:
        """The part of a delta, without log-probabilities."""
        is_first, self._begun[index] = not self._begun[index], True
        self._num_generated += len(delta.tokens)
        # A delta without tokens, such as a stream's end, has no ids, but a choice without tokens has an empty list.
        has_ids = self._plan.returns_ids and (is_first or delta.tokens)
        ids = self._ids(index, delta, is_first) if has_ids else b""
        return Part(self._text(index, delta, is_first), None, delta.finish_reason, is_first, ids)

    def _logprobs(self, index: int, delta: Delta, is_first: bool) -> Iterator[Fragments]:
        """The log-probabilities that a delta adds to a choice, one slice at a time."""
        prompt = self._prompt(index)
        if is_first:
            if self._plan.echo:
                first = index - index % self._plan.request.n  # the choice that computed the prompt's logprobs for all
                yield from prompt.echo_logprobs(self._streams[first].prompt_logprobs)
            self._writers[index] = prompt.writer.copy()
        writer = self._writers[index]
        assert writer is not None, "a choice begins with its first delta"
        for tokens, entries in writer.slices(delta.tokens, delta.logprobs):
            yield writer.take(tokens, entries)

    def _prompt(self, index: int) -> PromptShare:
        """The `PromptShare` of this choice's prompt."""
        return self._prompts[index // self._plan.request.n]

    def _text(self, index: int, delta: Delta, is_first: bool) -> str:
        text = self._spaces[index].spaced(delta)
        return self._prompt(index).text + text if is_first and self._plan.echo else text

    @abstractmethod
    def _logprobs_writer(self, prompt: Sequence[int], num_top: int) -> LogprobsWriter: ...
    @abstractmethod
    def _chunk_fields(self, part: Part) -> bytes: ...
    @abstractmethod
    def _choice_fields(self, index: int, part: Part) -> bytes: ...


class CompletionSerializer(ChoicesSerializer):
    id_prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def _logprobs_writer(self, prompt: Sequence[int], num_top: int) -> LogprobsWriter:
        before = [] if self._plan.echo else prompt
        return CompletionLogprobs(self._tokenizer, num_top, before, names_ids=self._plan.names_ids)

    def _ids(self, index: int, delta: Delta, is_first: bool) -> bytes:
        """vLLM gives the prompt's ids beside those of each choice."""
        return super()._ids(index, delta, is_first) + (self._prompt_ids(index) if is_first else b"")

    def _chunk_fields(self, part: Part) -> bytes:
        return b'"text":' + encode(part.text)

    def _choice_fields(self, index: int, part: Part) -> bytes:
        return self._chunk_fields(part) + (self._prompt_logprobs_field(index) if self._prompt_logprobs else b"")
