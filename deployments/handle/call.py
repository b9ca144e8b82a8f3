"""One call by Serve handle: its streams, its time limit, and its record in the log, the metrics and the trace."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from deployments.engine.interface import Delta, Engine, Models
from deployments.engine.sequence_stream import SequenceStream
from deployments.handle_types import ChatPart, Sampled, ToolCallPart
from deployments.observe.request_log import RequestRecord
from deployments.openai.answers.answer import AnswerEnding
from deployments.openai.answers.parsed_answer import SingleAnswer
from deployments.openai.plan import Plan
from llama_core.errors import CallersDeadlineExceeded, QueueFull, RequestCancelled
from llama_core.scheduling.request import FinishReason, Request
from llama_core.text.tools.pieces import Arguments, CallStart, Content, Reasoning


class HandleModels(Models, Protocol):
    def abort(self, request_id: str) -> bool:
        """End the request with this id, of any client. False if it has no sequence here."""

    async def drain(self) -> None:
        """Take no new request, and wait up to `drain_timeout_s` for the live ones to end."""


class HandleEngine(Engine, Protocol):
    """An engine whose streams can be iterated over."""

    async def submit(
        self, request: Request, *, is_timed: bool = False, numerics: str = ""
    ) -> Sequence[SequenceStream]: ...


class Call:
    """Begun with the call; `close` at its end, before the record's outcome."""

    def __init__(self, engine: "HandleEngine", record: RequestRecord, *, logs_prompts: bool) -> None:
        self.record = record
        self.streams: list[SequenceStream] = []
        self.engine = engine
        self._logs_prompts = logs_prompts
        self._began = time.monotonic()
        self._deadline: asyncio.TimerHandle | None = None

    def planned(self, plan: Plan) -> None:
        if plan.request.prompts:
            self.record.planned(plan)
        if self._logs_prompts:
            self.record.prompts_are([self.engine.tokenizer.decode(prompt) for prompt in plan.request.prompts])

    async def submit(self, plan: Plan, limit_s: float | None = None) -> None:
        """Queue all of the plan's choices. limit_s: as of `ends_within`. Raises what `Engine.submit` raises."""
        self.planned(plan)
        if not plan.request.prompts:
            return
        self.streams += await self.engine.submit(plan.request, is_timed=self.record.is_traced)
        self.ends_within(limit_s)

    async def read_all(self, plan: Plan) -> None:
        """Queue the plan's choices, as many at once as the queue takes, and read them all. Raises RequestAborted."""
        self.planned(plan)
        num_read = 0
        for prompt, params in plan.request.choices():
            while True:
                try:
                    self.streams += await self.engine.submit(
                        Request([prompt], [params]), is_timed=self.record.is_traced
                    )
                    break
                except QueueFull:  # until some of this call's own have ended
                    if num_read == len(self.streams):
                        raise
                await self.read_to_end(self.streams[num_read])
                num_read += 1
        for stream in self.streams[num_read:]:
            await self.read_to_end(stream)

    def ends_within(self, limit_s: float | None) -> None:
        """The streams end with DeadlineExceeded so long after the call began. limit_s: of `checked_limit`."""
        if limit_s is None:
            return
        error = CallersDeadlineExceeded(f"The answer was not complete within {limit_s:g} s, the limit of this call.")

        def end() -> None:
            for stream in self.streams:
                stream.end(error)

        left_s = self._began + limit_s - time.monotonic()
        self._deadline = asyncio.get_running_loop().call_later(max(left_s, 0.0), end)

    async def deltas(self, stream: SequenceStream) -> AsyncIterator[Delta]:
        """The last has the finish reason "abort" if the sequence was aborted."""
        try:
            async for delta in stream:
                self.record.delta(delta)
                yield delta
        except RequestCancelled:
            yield Delta("", [], [], FinishReason.ABORT)

    async def parts(self, stream: SequenceStream) -> AsyncIterator[Sampled]:
        of_prompt = stream.sequence.params.prompt_logprobs  # which no part has had
        async for delta in self.deltas(stream):
            yield Sampled(
                delta.text,
                delta.tokens,
                None if delta.finish_reason is None else delta.finish_reason.value,
                list(delta.logprobs),
                len(stream.prompt_tokens),
                stream.num_cached_tokens,
                list(stream.prompt_logprobs) if of_prompt else [],
            )
            of_prompt = False

    async def chat_parts(self, plan: Plan) -> AsyncIterator[ChatPart]:
        """plan: of one prompt with one choice."""
        (stream,) = self.streams
        answer, ending = SingleAnswer(self.engine, plan, [stream]), AnswerEnding(plan.answer_ending)
        of_prompt = plan.request.params[0].prompt_logprobs  # which no part has had
        async for delta in self.deltas(stream):
            pieces = answer.take(ending.without(delta, stream))
            reason = None if delta.finish_reason is None else delta.finish_reason.value
            yield ChatPart(
                "".join(piece.text for piece in pieces if isinstance(piece, Content)),
                "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
                [_call_part(piece, answer) for piece in pieces if isinstance(piece, CallStart | Arguments)],
                "tool_calls" if reason == "stop" and answer.num_calls else reason,
                delta.tokens,
                list(delta.logprobs),
                answer.num_prompt,
                answer.num_cached,
                answer.num_reasoning,
                list(stream.prompt_logprobs) if of_prompt else [],
            )
            of_prompt = False

    async def read_to_end(self, stream: SequenceStream) -> None:
        async for delta in stream:
            self.record.delta(delta)

    def close(self) -> None:
        """Cancel the sequences that have not ended: nobody reads them any more."""
        for stream in self.streams:
            stream.cancel()
        if self._deadline is not None:
            self._deadline.cancel()
        self.record.submitted(self.streams)


def _call_part(piece: CallStart | Arguments, answer: SingleAnswer) -> ToolCallPart:
    if isinstance(piece, Arguments):
        return ToolCallPart(answer.last_call, "", "", piece.text)
    call_id = answer.new_call_id()
    return ToolCallPart(answer.last_call, call_id, piece.name, "")
