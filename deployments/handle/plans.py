"""Turns the arguments of calls by Serve handle into plans, as `openai/plan.py` does those of bodies."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from deployments.engine.interface import Engine
from deployments.handle_types import ChatRequest, Continuation, Prompt
from deployments.openai.field_types import MAX_CHOICES, bad_words_of
from deployments.openai.plan import Plan, encode_chat, parsed_answer
from deployments.openai.prompt_encoder import PromptEncoder
from deployments.openai.score import begin_of, scoring_plan
from deployments.openai.structured_outputs import grammar_of
from llama_core.errors import InvalidParameter
from llama_core.grammar.build import callers_grammar
from llama_core.scheduling.request import Request, Terms
from llama_core.scheduling.sampling_params import SamplingParams, whole_number
from llama_core.text.tokenizers.tokenizer import spellings

Result = TypeVar("Result")


class HandlePlans:
    """Of one call. encoder: of the replica."""

    def __init__(self, service: Engine, encoder: PromptEncoder) -> None:
        self._service = service
        self._encoder = encoder.of("", service)

    async def sample(
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
            raise InvalidParameter(f"bad_words: {error.message}", param="bad_words") from None
        spelled = spellings(words, self._service.tokenizer)
        encoder = self._encoder.of(options.terms.owner, self._service)
        made: dict[int, SamplingParams] = {}  # prompts may share one object
        for own in each:
            if id(own) not in made:
                grammar = await encoder.grammar(callers_grammar(own.grammar), "grammar") if own.grammar else ""
                made[id(own)] = replace(own, grammar=grammar, bad_words=(*own.bad_words, *spelled))
        ids = [await self.prompt_ids(prompt) for prompt in prompts]
        return replace(options, prompts=ids, params=[made[id(own)] for own in each])

    async def score(self, prompt: Any, continuations: Any) -> tuple[list[int], Plan]:
        """The number of continuations of each prompt, and the plan of all of them."""
        prompts = list(prompt) if are_prompts(prompt) else [prompt]
        wanted = continuations if are_prompts(prompt) or continuations is None else [continuations]
        if wanted is not None and (len(wanted) != len(prompts) or any(isinstance(own, str) for own in wanted)):
            raise InvalidParameter("continuations: several prompts need a list for each of them", param="continuations")
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
            raise InvalidParameter("prompt: each must have two tokens, of which the second is scored", param="prompt")
        return [(before, 1)]

    def _continued(self, prompt: Prompt, before: list[int], continuation: Continuation) -> tuple[list[int], int]:
        """The ids of prompt and continuation, and where the continuation begins."""
        tokenizer = self._service.tokenizer
        if isinstance(prompt, str) and isinstance(continuation, str):
            whole = tokenizer.encode(prompt + continuation, bos=True, eos=False)
            return whole, begin_of(continuation, before, whole)
        if isinstance(continuation, str):
            continuation = tokenizer.encode(continuation, bos=False, eos=False)
        return [*before, *continuation], len(before)

    async def chat(self, request: ChatRequest, params: SamplingParams) -> Plan:
        body, encoder = request.body(), self._encoder.of(request.owner, self._service)
        prompt = await encode_chat(body, encoder)
        grammar, param = grammar_of(body)
        if grammar and params.grammar:
            raise InvalidParameter(f"{param}: {param} and params.grammar exclude each other", param=param)
        if params.grammar:
            grammar, param = callers_grammar(params.grammar), "grammar"
        parsing, grammar = await parsed_answer(body, self._service, encoder, prompt, grammar, param)
        bad_words = (*params.bad_words, *spellings(body.bad_words, self._service.tokenizer))
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
            answer_ending=self._service.chat_format.answer_ending,
            continues_prompt=body.chat_options.continue_final_message,
            parsing=parsing,
        )

    async def in_thread_if_slow(self, work: Callable[[], Result]) -> Result:
        """`work()` encodes dialogs; a chat template may take long for a short one."""
        return work() if self._service.chat_format.is_quick else await asyncio.to_thread(work)

    async def prompt_ids(self, prompt: Prompt) -> list[int]:
        return await self.in_thread_if_slow(lambda: self._tokens_of(prompt))

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._service.tokenizer.encode(prompt, bos=True, eos=False)
        if all(isinstance(part, int) for part in prompt):
            return list(prompt)  # type: ignore[arg-type]
        if all(isinstance(part, dict) for part in prompt):
            return self._service.chat_format.encode(prompt)  # type: ignore[arg-type]
        raise InvalidParameter("prompt must be a text, a list of token ids or a dialog", param="prompt")


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


def checked_n(n: object, num_prompts: int, most: int) -> int:
    """`n`, the continuations of each prompt, as an int. most: sequences that an idle server can take at once.

    Raises InvalidParameter unless `n` is within the bounds of HTTP's field, and the server could take all sequences.
    """
    count = whole_number("n", n)
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidParameter(f"n must be from 1 to {MAX_CHOICES}", param="n")
    if num_prompts * count > most:
        raise InvalidParameter(f"n: prompts * n must be at most {most} (max_batch_size + max_queue)", param="n")
    return count
