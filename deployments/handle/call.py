"""One call by Serve handle: its plan, as `openai/plan.py` makes those of bodies, its streams, its time limit, and its record in
the log, the metrics and the trace."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from deployments.engine.interface import Engine, Models
from deployments.engine.sequence_stream import Delta, SequenceStream
from deployments.handle_types import ChatPart, ChatRequest, Continuation, Prompt, Sampled, ToolCallPart
from deployments.observe.request_log import RequestRecord
from deployments.openai.answers.answer import AnswerEnding
from deployments.openai.answers.parsed_answer import SingleAnswer
from deployments.openai.field_types import MAX_CHOICES, bad_words_of
from deployments.openai.plan import Plan, encode_chat, parsed_answer
from deployments.openai.prompt_encoder import PromptEncoder
from deployments.openai.score import begin_of, scoring_plan
from deployments.openai.structured_outputs import grammar_of
from llama_core.errors import CallersDeadlineExceeded, InvalidParameter, QueueFull, RequestCancelled
from llama_core.grammar.build import callers_grammar
from llama_core.scheduling.request import FinishReason, Request, Terms
from llama_core.scheduling.sampling_params import SamplingParams, whole_number
from llama_core.text.tokenizers.tokenizer import spellings
from llama_core.text.tools.pieces import Arguments, CallStart, Content, Reasoning

Result = TypeVar("Result")


class HandleModels(Models, Protocol):
    def abort(self, request_id: str) -> bool:
        """End the request with this id, of any client. False if it has no sequence here."""

    async def drain(self) -> None:
        """Take no new request, and wait up to `drain_timeout_s` for the live ones to end."""


class Call:
    """Begun with the call; `close` at its end, before the record's outcome."""

    def __init__(self, engine: Engine, encoder: PromptEncoder, record: RequestRecord, *, logs_prompts: bool) -> None:
        """encoder: of the replica."""
        self.engine, self.record = engine, record
        self._encoder = encoder
        self.streams: list[SequenceStream] = []
        self._logs_prompts = logs_prompts
        self._began = time.monotonic()
        self._deadline: asyncio.TimerHandle | None = None

    async def plan_sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        bad_words: object,
        options: Request,
    ) -> Request:
        """params: for all prompts, or one for each. options: the request without prompts and parameters."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidParameter("params must be one SamplingParams, or one for each prompt", param="params")
        try:
            words = bad_words_of(list(bad_words) if isinstance(bad_words, tuple) else bad_words)
        except InvalidParameter as error:
            raise InvalidParameter.of("bad_words", error.message) from None
        spelled = spellings(words, self.engine.tokenizer)
        encoder = self._encoder.of(options.terms.owner, self.engine)
        made: dict[int, SamplingParams] = {}  # prompts may share one object
        for own in each:
            if id(own) not in made:
                grammar = await encoder.grammar(callers_grammar(own.grammar), "grammar") if own.grammar else ""
                made[id(own)] = replace(own, grammar=grammar, bad_words=(*own.bad_words, *spelled))
        ids = [await self.prompt_ids(prompt) for prompt in prompts]
        return replace(options, prompts=ids, params=[made[id(own)] for own in each])

    async def plan_score(self, prompt: Any, continuations: Any) -> tuple[list[int], Plan]:
        """The number of continuations of each prompt, and the plan of all of them."""
        prompts = list(prompt) if are_prompts(prompt) else [prompt]
        wanted = continuations if are_prompts(prompt) or continuations is None else [continuations]
        if wanted is not None and (len(wanted) != len(prompts) or any(isinstance(own, str) for own in wanted)):
            raise InvalidParameter.of("continuations", "several prompts need a list for each of them")
        pairs = [
            await self._pairs(each, None if wanted is None else wanted[index]) for index, each in enumerate(prompts)
        ]
        every = [pair for own in pairs for pair in own]
        return list(map(len, pairs)), scoring_plan([ids for ids, _ in every], [begin for _, begin in every])

    async def _pairs(self, prompt: Prompt, continuations: Sequence[Continuation] | None) -> list[tuple[list[int], int]]:
        """The ids of the prompt with each continuation, and where what is scored begins."""
        before = await self.prompt_ids(prompt)
        if continuations is not None:
            return [self._continued(prompt, before, continuation) for continuation in continuations]
        if len(before) < 2:
            raise InvalidParameter.of("prompt", "each must have two tokens, of which the second is scored")
        return [(before, 1)]

    def _continued(self, prompt: Prompt, before: list[int], continuation: Continuation) -> tuple[list[int], int]:
        """The ids of prompt and continuation, and where the continuation begins."""
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str) and isinstance(continuation, str):
            whole = tokenizer.encode(prompt + continuation, bos=True, eos=False)
            return whole, begin_of(continuation, before, whole)
        if isinstance(continuation, str):
            continuation = tokenizer.encode(continuation, bos=False, eos=False)
        return [*before, *continuation], len(before)

    async def plan_chat(self, request: ChatRequest, params: SamplingParams) -> Plan:
        body, encoder = request.body(), self._encoder.of(request.owner, self.engine)
        prompt = await encode_chat(body, encoder)
        grammar, param = grammar_of(body)
        if grammar and params.grammar:
            raise InvalidParameter.of(param, f"{param} and params.grammar exclude each other")
        if params.grammar:
            grammar, param = callers_grammar(params.grammar), "grammar"
        parsing, grammar = await parsed_answer(body, self.engine, encoder, prompt, grammar, param)
        bad_words = (*params.bad_words, *spellings(body.bad_words, self.engine.tokenizer))
        wanted = Request(
            [prompt],
            [replace(params, grammar=grammar, bad_words=bad_words)],
            stop=tuple(body.stop),
            terms=Terms(request.owner, request.priority),
            skip_special_tokens=request.skip_special_tokens,
            shown_tokens=frozenset() if parsing is None else parsing.shown_tokens,
        )
        return Plan(
            wanted,
            answer_ending=self.engine.chat_format.answer_ending,
            continues_prompt=body.chat_options.continue_final_message,
            parsing=parsing,
        )

    async def in_thread_if_slow(self, work: Callable[[], Result]) -> Result:
        """`work()` encodes dialogs; a chat template may take long for a short one."""
        return work() if self.engine.chat_format.is_quick else await asyncio.to_thread(work)

    async def prompt_ids(self, prompt: Prompt) -> list[int]:
        return await self.in_thread_if_slow(lambda: self._tokens_of(prompt))

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt, bos=True, eos=False)
        if all(isinstance(part, int) for part in prompt):
            return list(prompt)  # type: ignore[arg-type]
        if all(isinstance(part, dict) for part in prompt):
            return self.engine.chat_format.encode(prompt)  # type: ignore[arg-type]
        raise InvalidParameter("prompt must be a text, a list of token ids or a dialog", param="prompt")

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
        if any(params.pooling for params in plan.request.params):
            raise InvalidParameter.of("pooling", "an answer has no embedding; POST /v1/embeddings gives it")
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
                answer.stream.num_cached_tokens,
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


def are_prompts(prompt: Any) -> bool:
    """Whether it is a list of prompts: not a text, token ids or a dialog."""
    return not isinstance(prompt, str) and bool(len(prompt)) and not isinstance(prompt[0], int | Mapping)


def checked_limit(timeout_s: object) -> float | None:
    """The time limit of a call in seconds; None for none. Raises InvalidParameter unless it is positive and finite."""
    if timeout_s is None:
        return None
    try:
        limit_s = math.nan if isinstance(timeout_s, bool | str | bytes) else float(timeout_s)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        limit_s = math.nan
    if not 0 < limit_s < math.inf:
        raise InvalidParameter("timeout_s must be a finite number of seconds greater than 0", param="timeout_s")
    return limit_s


def checked_n(n: object, num_prompts: int, engine: Engine) -> int:
    """`n`, the continuations of each prompt, as an int.

    Raises InvalidParameter unless `n` is within the bounds of HTTP's field, and an idle server could take all sequences.
    """
    count = whole_number("n", n)
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidParameter(f"n must be from 1 to {MAX_CHOICES}", param="n")
    state = engine.describe()
    most = state.max_batch_size + state.max_queue
    if num_prompts * count > most:
        raise InvalidParameter.of("n", f"prompts * n must be at most {most} (max_batch_size + max_queue)")
    return count
