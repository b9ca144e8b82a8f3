"""An answer does not depend on how its tokens are divided into deltas, and neither does what a serializer writes next."""

import random
import re
import tracemalloc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import pytest

from deployments.engine.sequence_stream import SequenceStream
from deployments.http.choices import submitted
from deployments.http.generation_kinds import CHAT, COMPLETIONS, MESSAGES, RESPONSES, GenerationKind
from deployments.http.limits import HttpLimits
from deployments.openai.plan import Plan
from deployments.openai.prompt_encoder import PromptEncoder
from llama_core.scheduling.request import FinishReason, Request, TokenLogprob
from llama_core.scheduling.request import Sequence as Seq
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.template.chat_template import TemplateChatFormat
from tests.deployments.http.resume.test_resumed_streams import equals_uncut_at_every_event
from tests.support.joined_events import joined
from tests.support.requests import now
from tests.support.scripted_engine import FakeEngine, calling_engine
from tests.support.tool_calls import FORMATS, TOOLS, random_answer

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
THINKS = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}<think>{# </think> #}"
REASONING = "So it is.\n</think>\n\nYes, it is so, 🦙.  "
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
_VARYING = re.compile(rb'"(sequence_number|created|created_at|completed_at)":\d+')


async def written_streams(engine: FakeEngine, request: Request, **_: bool) -> list[SequenceStream]:
    """Streams whose sequences have ended, each with an answer that is one token shorter than the one before."""
    streams = []
    for index, (prompt, params) in enumerate(request.choices()):
        tokens = engine.tokenizer.encode(engine.answer, bos=False, eos=False)[: -index or None][: params.max_tokens]
        seq = Seq(prompt, params, len(prompt) + params.max_tokens)
        stream = SequenceStream(seq, engine.tokenizer, request, lambda seq: None)
        for token in tokens:
            seq.tokens.append(token)
            seq.logprobs.append(engine.logprob(token, params))
            if stream.push([token]):
                break
        seq.prompt_logprobs = [engine.logprob(token, params) for token in prompt[1:]]
        seq.finish_reason = FinishReason.STOP
        stream.push([])
        streams.append(stream)
    return streams


class Written:
    """One request's answer, of which the choices' deltas end where the reader asks."""

    def __init__(self, kind: GenerationKind[Any], engine: FakeEngine, plan: Plan) -> None:
        self.choices = now(submitted(engine, plan))
        self._serializer = cast(Any, kind.serializer(engine, plan, self.choices.streams))
        self.events = self._serializer.opening()

    async def to(self, index: int, until: int) -> bytes:
        delta = await self.choices.take_to(index, until, 60)
        assert delta is not None
        written = self._serializer.chunk(index, delta)
        written = written if isinstance(written, bytes) else b"".join(written)
        self.events += written
        return _VARYING.sub(b"", written)

    def end(self) -> list[Any]:
        assert not self.choices.num_open
        return joined((self.events + self._serializer.end_of_stream()).split(b"\n\n")[:-1])


def groupings(draw: random.Random, lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Ends of deltas of every choice, in turns; the answer's end counts as a token."""
    at = [0] * len(lengths)
    while open_choices := [index for index, length in enumerate(lengths) if at[index] < length]:
        index = draw.choice(open_choices)
        at[index] = min(lengths[index], at[index] + draw.choice((1, 1, 2, 3, 7, 40)))
        yield index, at[index]


def cases() -> Iterator[Any]:
    for name, kind, engine, body in _cases():
        engine.submit = partial(written_streams, engine)  # type: ignore[assignment]
        engine.readmit = _readmit  # type: ignore[method-assign]
        yield pytest.param(kind, engine, body, id=name)


async def _readmit(streams: Sequence[Any], **_: bool) -> None:
    for stream in streams:
        stream.begin_again(is_timed=False)


def _cases() -> Iterator[tuple[str, GenerationKind[Any], FakeEngine, dict[str, Any]]]:
    llama = "Hello there, 🦙 how are you? "
    described = {"tools": [tool.described() for tool in TOOLS]}
    flat = {"tools": [{"type": "function", "name": tool.name, "parameters": {}} for tool in TOOLS]}
    inputs = {"tools": [{"name": tool.name, "input_schema": {"type": "object"}} for tool in TOOLS]}
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    completion = {"prompt": ["Once", "There was"], "max_tokens": 200}
    yield "completions", COMPLETIONS, calling_engine(llama), completion | {"n": 3} | usage
    yield "logprobs", COMPLETIONS, calling_engine(llama), completion | {"n": 2, "logprobs": 2, "echo": True}
    yield "ids", COMPLETIONS, calling_engine(llama), completion | {"return_token_ids": True}
    yield "stop", COMPLETIONS, calling_engine(llama), completion | {"stop": ["how are", "there!"]}
    yield "chat", CHAT, calling_engine(llama), HELLO | {"n": 3} | LOGPROBS
    yield "cut", CHAT, calling_engine(llama), HELLO | {"max_tokens": 5, "return_token_ids": True}
    for tool_format in FORMATS:
        text = "".join(random_answer(random.Random(f"{tool_format} 3"), tool_format)[0]) + " "
        engine = calling_engine(text, tool_format)
        yield f"{tool_format} chat", CHAT, engine, HELLO | described | {"n": 2}
        yield f"{tool_format} logprobs", CHAT, engine, HELLO | described | LOGPROBS
        yield f"{tool_format} messages", MESSAGES, engine, HELLO | inputs | {"max_tokens": 500}
        yield f"{tool_format} responses", RESPONSES, engine, {"input": "Hello"} | flat
    thinking = calling_engine(REASONING)
    thinking.chat_format = TemplateChatFormat(thinking.tokenizer, THINKS)
    yield "reasoning chat", CHAT, thinking, HELLO | {"n": 3} | usage
    yield "reasoning messages", MESSAGES, thinking, HELLO | {"max_tokens": 500}
    yield "reasoning responses", RESPONSES, thinking, {"input": "Hello"}


@pytest.mark.parametrize(("kind", "engine", "body"), list(cases()))
async def test_a_delta_of_many_tokens_is_cut_between_any_two_of_its_events(
    kind: GenerationKind[Any], engine: FakeEngine, body: dict[str, Any]
) -> None:
    assert await equals_uncut_at_every_event(engine, body | {"stream": True}, kind.path) > 1


@pytest.mark.parametrize(("kind", "engine", "body"), list(cases()))
async def test_an_answer_and_what_comes_next_do_not_depend_on_the_grouping(
    kind: GenerationKind[Any], engine: FakeEngine, body: dict[str, Any]
) -> None:
    parsed = kind.body.model_validate(body | {"stream": True})
    plan = await kind.plan(parsed, engine, PromptEncoder(HttpLimits().text).of("", engine))
    lengths = [len(stream.sequence.output) + 1 for stream in await written_streams(engine, plan.request)]

    async def token_by_token(ends: Sequence[int]) -> Written:
        written = Written(kind, engine, plan)
        for index, end in enumerate(ends):
            for until in range(1, end + 1):
                await written.to(index, until)
        return written

    expected = (await token_by_token(lengths)).end()
    draw = random.Random(0)
    for _ in range(8):
        grouped, at = Written(kind, engine, plan), [0] * len(lengths)
        for index, until in groupings(draw, lengths):
            events = await grouped.to(index, until)
            if draw.random() < 0.3:
                assert events == await (await token_by_token(at)).to(index, until)
            at[index] = until
        assert grouped.end() == expected


@pytest.mark.parametrize(("num_tokens", "num_top"), [(0, None), (100, None), (1000, 0), (1000, 5), (1000, 20)])
def test_the_bytes_of_a_suspended_stream_are_counted(num_tokens: int, num_top: int | None) -> None:
    engine = FakeEngine()

    def suspended() -> SequenceStream:
        params = SamplingParams(max_tokens=num_tokens + 1)
        seq = Seq([1, 2, 3], params, 4 + num_tokens)
        for number in range(num_tokens):
            seq.tokens.append(int(str(300 + number % 200)))  # an integer of its own
            if num_top is not None:
                top = tuple((int(str(300 + rank)), rank + 0.25) for rank in range(num_top))
                seq.logprobs.append(TokenLogprob(number + 0.5, top))
        stream = SequenceStream(seq, engine.tokenizer, Request([seq.prompt], [params]), lambda seq: None)
        stream.suspend()
        return stream

    suspended()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        streams = [suspended() for _ in range(5)]
        real = (tracemalloc.get_traced_memory()[0] - before) / 5
    finally:
        tracemalloc.stop()
    assert 0.8 * real < streams[0].num_bytes < 1.25 * real, real
