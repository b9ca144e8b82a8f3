"""Turns a validated body into a plan: the request for the engine, and the form of the answer.

Decides defaults and seeds. From here on, chat and completions are handled alike.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from deployments.engine.interface import Engine, Models, SamplingDefaults
from deployments.openai.errors import ModelNotFound
from deployments.openai.field_types import NO_LIMIT
from deployments.openai.prompt_encoder import PromptEncoder
from deployments.openai.schemas import ChatBody, CompletionBody, GenerationBody
from deployments.openai.structured_outputs import grammar_of
from deployments.openai.unsupported import CHAT_NEUTRAL, COMPLETION_NEUTRAL, MESSAGE_NEUTRAL, refuse_unsupported
from llama_core.errors import InvalidParameter
from llama_core.scheduling.request import Request, Terms
from llama_core.scheduling.sampling_params import SLOT_FIELDS, SamplingParams
from llama_core.text.answer_format import AnswerFormat, AnswerReader
from llama_core.text.tokenizers.tokenizer import spellings
from llama_core.text.tools.tool import ToolUse

_DEFAULTS = tuple(field.name for field in fields(SamplingDefaults))
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat answer may fill the context
# Of one request: about 15 MB of answer. No decode step paces a client that asks for prompt log-probabilities.
MAX_PROMPT_LOGPROBS = 2**18
# Of the tokens that one request may generate: about 110 MB in the replica until the request ends, and up to 90 MB of answer.
MAX_LOGPROBS = 2**20


@dataclass(frozen=True, slots=True)
class AnswerParsing:
    """How a chat's answer is divided. begun: it begins within the reasoning. is_legacy: it has `function_call`. is_either: it
    is calls alone, or follows the grammar that the request asks for. hides_reasoning: the client does not get it."""

    answer_format: AnswerFormat
    use: ToolUse | None
    begun: bool
    is_legacy: bool = False
    is_either: bool = False
    hides_reasoning: bool = False

    def reader(self) -> AnswerReader:
        return self.answer_format.reader(self.use, begun=self.begun, leading=self.is_either)

    @property
    def shown_tokens(self) -> frozenset[int]:
        return self.answer_format.shown_tokens(self.use)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the engine computes, and the form of the answer."""

    request: Request
    num_returned: int = 0  # of each prompt's choices, those with the highest mean log-probability; 0: all
    num_top: int | None = None  # the answer has log-probabilities, with so many alternatives
    names_ids: bool = False  # the log-probabilities name tokens by their ids
    returns_ids: bool = False  # the answer has the token ids of the prompts and of the choices
    num_prompt_top: int | None = None  # the answer has the field `prompt_logprobs`, with so many alternatives
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    names_service_tier: bool = False  # the answer has service_tier, as OpenAI's has where the request has it
    token_limit: int | None = (
        None  # as the request has it: the context may have less room. 0: the answer is the echoed prompt
    )
    answer_ending: str = ""  # which the chat format writes after each answer, and the answer leaves out
    continues_prompt: bool = False  # the answer's text goes on where that of the prompt ends, within a word too
    scored_from: tuple[int, ...] = ()  # by prompt: where the continuation begins whose likelihood is asked for
    parsing: AnswerParsing | None = None  # None: the answer's text is passed on as it is
    is_seeded: bool = False  # the request names its seed
    form: Any = None  # of the answer: what else a dialect's serializer reads
    # From which all ids in the answer are made.
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)

    @property
    def shares_prompt_logprobs(self) -> bool:
        return self.request.n > 1 and self.request.params[0].prompt_logprobs


async def plan_completion(body: CompletionBody, engine: Engine, encoder: PromptEncoder) -> Plan:
    """Raises InvalidRequest where the body contradicts the model, the vocabulary or the context."""
    refuse_unsupported(body.given(COMPLETION_NEUTRAL), COMPLETION_NEUTRAL)
    prompts = await encoder.prompts(
        body.prompt,
        bos=body.add_special_tokens is not False,
        n=body.num_sampled,
        parse_special=bool(body.parse_special),
    )
    if body.echo:
        _check_prompt_logprobs(prompts, body.num_sampled, body.logprobs, "logprobs", "with echo, ")
    _check_prompt_logprobs(prompts, body.num_sampled, body.prompt_logprobs, "prompt_logprobs")
    limits = [_max_tokens(prompt, body, DEFAULT_COMPLETION_TOKENS, engine) for prompt in prompts]
    num_returned = body.n or 1
    ranks_choices = body.num_sampled > num_returned
    logprobs = 0 if ranks_choices and body.logprobs is None else body.logprobs
    _check_logprobs(limits, body.num_sampled, {"logprobs": logprobs, "prompt_logprobs": body.prompt_logprobs})
    grammar = await encoder.grammar(*grammar_of(body))
    plan = _plan(body, prompts, limits, engine, logprobs, grammar, echo=bool(body.echo))
    plan = replace(plan, continues_prompt=True)
    if not ranks_choices:
        return plan
    request = replace(plan.request, n=body.num_sampled)
    if body.logprobs is None and body.prompt_logprobs is None:
        request = replace(request, params=[replace(each, prompt_logprobs=False) for each in request.params])
    return replace(plan, request=request, num_returned=num_returned, num_top=body.logprobs)


async def plan_chat(body: ChatBody, engine: Engine, encoder: PromptEncoder) -> Plan:
    """Raises InvalidRequest as `plan_completion` does, and InvalidDialog or SpecialTags that name the message's index."""
    refuse_unsupported(body.given(CHAT_NEUTRAL), CHAT_NEUTRAL)
    for index, message in enumerate(body.messages):
        if message.model_extra:
            refuse_unsupported(message.model_extra, MESSAGE_NEUTRAL, where=f"messages[{index}].")
    prompt = await encode_chat(body, encoder)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limits = [_max_tokens(prompt, body, engine.max_seq_len, engine)]
    _check_prompt_logprobs([prompt], 1, body.prompt_logprobs, "prompt_logprobs")
    _check_logprobs(limits, body.n or 1, {"top_logprobs": logprobs, "prompt_logprobs": body.prompt_logprobs})
    parsing, grammar = await parsed_answer(body, engine, encoder, prompt, *grammar_of(body))
    plan = _plan(body, [prompt], limits, engine, logprobs, grammar, parsing=parsing)
    ending, continues = engine.chat_format.answer_ending, bool(body.continue_final_message)
    return replace(plan, answer_ending=ending, continues_prompt=continues)


async def encode_chat(body: ChatBody, encoder: PromptEncoder) -> list[int]:
    """The prompt of a chat, with its tools."""
    tools = body.offered if body.tool_use() is not None else ()
    options = body.chat_options
    if tools or body.effort is not None:
        options = replace(options, tools=tools, reasoning_effort=body.effort)
    return await encoder.dialog(body.messages, options, n=body.n or 1)


async def parsed_answer(
    body: ChatBody, engine: Engine, encoder: PromptEncoder, prompt: list[int], wanted: str, param: str
) -> tuple[AnswerParsing | None, str]:
    """How the answer to `prompt` is divided, None where its text is passed on as it is; and its grammar, checked. wanted: the
    grammar that the field `param` asks for, or "". Raises what `PromptEncoder.grammar` raises."""
    form, use = engine.answer_format, body.tool_use()
    if use is None and form.marks is None:
        return None, await encoder.grammar(wanted, param)
    begun = form.begins_reasoning(prompt)
    is_either = bool(wanted) and use is not None and use.mode == "auto"
    parsing = AnswerParsing(form, use, begun, body.is_legacy, is_either, body.include_reasoning is False)
    return parsing, await encoder.grammar(wanted, param, use, begun=None if form.marks is None else begun)


def engine_of(engine: Models, model: str | None) -> Engine:
    """The engine of the model that a request names; of the first one where it names none. Raises ModelNotFound."""
    models = engine.models
    model = engine.model_id if model is None else model
    if (found := models.get(model)) is not None:
        return found
    served = ", ".join(f"'{name}'" for name in models)
    text = f"the one served is {served}" if len(models) == 1 else f"those served are {served}"
    raise ModelNotFound.of("model", f"no such model here; {text}")


def _max_tokens(prompt: list[int], body: GenerationBody, default: int, engine: Engine) -> int:
    """The requested limit, or the default, cut to what the prompt leaves of the context, which is at least one token.

    0 becomes 1: a sequence samples at least one token, which the answer leaves out (`Plan.token_limit`).
    """
    room = engine.max_seq_len - len(prompt)
    limit = default if body.token_limit is None else body.token_limit
    return room if limit == NO_LIMIT else min(max(limit, 1), room)


def _check_prompt_logprobs(prompts: list[list[int]], n: int, num_top: int | None, param: str, where: str = "") -> None:
    """num_top: the alternatives that the field `param` asks for."""
    num_logprobs = 0 if num_top is None else sum(map(len, prompts)) * n * (num_top + 1)
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        raise InvalidParameter.of(
            param, f"{where}prompt tokens x n x ({param} + 1) must be at most {MAX_PROMPT_LOGPROBS}, not {num_logprobs}"
        )


def _check_logprobs(limits: list[int], n: int, num_top: Mapping[str, int | None]) -> None:
    """limits: the most new tokens of each prompt. num_top: by field, the alternatives that it asks for. A rank computes as
    many for new tokens as for the prompt's."""
    param, most = max(num_top.items(), key=lambda asked: -1 if asked[1] is None else asked[1])
    num_logprobs = 0 if most is None else sum(limits) * n * (most + 1)
    if num_logprobs > MAX_LOGPROBS:
        raise InvalidParameter.of(
            param,
            f"prompts x n x max_tokens x ({param} + 1) must be at most {MAX_LOGPROBS}, not {num_logprobs}; "
            "lower max_tokens, which in a chat is the rest of the context unless given",
        )


def _plan(
    body: GenerationBody,
    prompts: list[list[int]],
    limits: list[int],
    engine: Engine,
    logprobs: int | None,
    grammar: str,
    *,
    echo: bool = False,
    parsing: AnswerParsing | None = None,
) -> Plan:
    echoes_logprobs = echo and logprobs is not None
    token_limit = body.token_limit
    body.check_min_tokens(0 if token_limit == 0 else min(limits))
    first = SamplingParams(
        **_slot_values(body, engine),
        max_tokens=limits[0],
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs if body.prompt_logprobs is None else max(logprobs or 0, body.prompt_logprobs),
        prompt_logprobs=echoes_logprobs or body.prompt_logprobs is not None,
        # lm-eval leaves out the one generated token's entry: there has to be one where the model would end the text.
        ignore_eos=bool(body.ignore_eos) or (echoes_logprobs and token_limit == 1 and not grammar),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        logit_bias=tuple(body.logit_bias.items()),
        bad_words=spellings(body.bad_words, engine.tokenizer) if body.bad_words else (),
        allowed_token_ids=tuple(body.allowed_token_ids),
        grammar=grammar,
    )
    options = body.stream_options
    request = Request(
        prompts,
        [first, *(replace(first, max_tokens=limit) for limit in limits[1:])],
        n=body.n or 1,
        stop=tuple(body.stop),
        terms=Terms(body.user or "", body.priority or 0),
        skip_special_tokens=body.skip_special_tokens is not False,
        shown_tokens=frozenset() if parsing is None else parsing.shown_tokens,
    )
    return Plan(
        request,
        num_top=logprobs,
        names_ids=bool(body.return_tokens_as_token_ids),
        returns_ids=bool(body.return_token_ids),
        num_prompt_top=body.prompt_logprobs,
        echo=echo,
        names_service_tier=body.service_tier is not None,
        token_limit=token_limit,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        parsing=parsing,
        is_seeded=body.seed is not None,
    )


def _slot_values(body: GenerationBody, engine: Engine) -> dict[str, Any]:
    """By name, what the body or the server's defaults say of `SLOT_FIELDS`. The seed of a body without one is a new one."""
    defaults = engine.sampling_defaults
    values = {name: getattr(defaults, name) for name in _DEFAULTS}
    given = body.model_fields_set.intersection(SLOT_FIELDS)
    values |= {name: value for name in given if (value := getattr(body, name)) is not None}
    if values["top_k"] == -1:  # vLLM's "no limit"
        values["top_k"] = 0
    if values["top_p"] == 0:  # the most likely token alone
        values |= {"temperature": 0.0, "top_p": 1.0}
    if body.seed is None:
        values["seed"] = engine.next_seed()
    return values
