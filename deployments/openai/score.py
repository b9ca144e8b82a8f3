"""Log-likelihoods of given continuations, and the choice among labels: `/v1/score` and `/v1/classify`.

Nothing is generated: each continuation is a prompt whose log-probabilities are added up. The requests share the life of a
generating request (`generation.py`).
"""

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
from pydantic import Field

from deployments.engine.interface import Engine
from deployments.engine.sequence_stream import SequenceStream
from deployments.openai.answers.answer import CollectedChoice, Sliced
from deployments.openai.answers.completions import usage_of
from deployments.openai.dialog_fields import DialogOptions, Messages
from deployments.openai.field_types import MAX_CHOICES, MAX_PRIORITY, Body, Flag, OptionalInteger, Prompt, User
from deployments.openai.plan import MAX_PROMPT_LOGPROBS, Plan
from deployments.openai.prompt_encoder import PromptEncoder
from llama_core.errors import InvalidParameter
from llama_core.scheduling.request import Request, Terms
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.chat_format import ChatOptions

MAX_LABEL_CHARS = 4096
NO_TERMS = Terms()


class ScoringBody(Body):
    """The fields that scoring and classification share."""

    model: str | None = None
    user: User = None
    priority: OptionalInteger = Field(None, ge=0, le=MAX_PRIORITY)
    add_special_tokens: Flag = Field(None, description="false: no BOS before a text prompt.")


class ScoreBody(ScoringBody):
    prompt: Prompt = Field(description="One prompt: a text or token ids.")
    continuations: Prompt = Field(description="Texts, or lists of token ids; each goes on with the prompt.")


class ClassifyBody(DialogOptions, ScoringBody):
    prompt: str | None = Field(None, description="A text; or messages.")
    messages: Messages = Field(default_factory=list)
    labels: list[str] = Field(min_length=2, max_length=MAX_CHOICES)
    normalize: Flag = Field(None, description="Divide each label's log-likelihood by its number of tokens.")


async def plan_score(body: ScoreBody, engine: Engine, encoder: PromptEncoder) -> Plan:
    """Raises InvalidRequest where the body contradicts the model, the vocabulary or the context."""
    if len(body.prompt) != 1:
        raise InvalidParameter.of("prompt", "must be one text or one list of token ids")
    bos = body.add_special_tokens is not False
    texts, prompt = body.continuations, body.prompt[0]
    if isinstance(prompt, str) and isinstance(texts[0], str):
        return await _plan_texts(body, encoder, prompt, [str(text) for text in texts], bos)
    [before] = await encoder.prompts(body.prompt, bos=bos, n=1, num_new=0)
    after = await encoder.prompts(body.continuations, bos=False, n=1, param="continuations", num_new=0)
    return _plan(body, [[*before, *ids] for ids in after], [len(before)] * len(after))


async def plan_classify(body: ClassifyBody, engine: Engine, encoder: PromptEncoder) -> Plan:
    """Raises what `plan_score` raises, and InvalidDialog."""
    if (body.prompt is None) == (not body.messages):
        raise InvalidParameter.of("prompt", "send either prompt or messages")
    if not all(1 <= len(label) <= MAX_LABEL_CHARS for label in body.labels) or len(set(body.labels)) < len(body.labels):
        raise InvalidParameter.of("labels", f"must be different texts of 1 to {MAX_LABEL_CHARS} characters")
    if body.prompt is not None:
        bos = body.add_special_tokens is not False
        plan = await _plan_texts(body, encoder, body.prompt, body.labels, bos)
    else:
        options = ChatOptions(True, False, body.chat_template_kwargs)
        before = await encoder.dialog(body.messages, options)
        after = await encoder.prompts(body.labels, bos=False, n=1, param="labels", num_new=0)
        plan = _plan(body, [[*before, *ids] for ids in after], [len(before)] * len(after))
    return replace(plan, form=body)


async def _plan_texts(body: ScoringBody, encoder: PromptEncoder, prompt: str, texts: Sequence[str], bos: bool) -> Plan:
    """Prompt and continuation are encoded together, as one text: a token may begin in neither of them alone."""
    [before] = await encoder.prompts([prompt], bos=bos, n=1, num_new=0)
    whole = await encoder.prompts([prompt + text for text in texts], bos=bos, n=1, num_new=0)
    return _plan(body, whole, [begin_of(text, before, ids) for text, ids in zip(texts, whole, strict=True)])


def begin_of(text: str, before: list[int], whole: list[int]) -> int:
    """Where the continuation `text` begins in the ids of prompt and continuation, as lm-eval counts: the tokens after as many
    as the prompt alone has, `before`. An empty text has none."""
    return min(len(before), len(whole) - 1) if text else len(whole)


def scoring_plan(prompts: list[list[int]], begins: Sequence[int], terms: Terms = NO_TERMS) -> Plan:
    """prompts: each with its continuation, which begins at the place of `begins`."""
    if not all(1 <= begin < len(ids) for begin, ids in zip(begins, prompts, strict=True)):
        raise InvalidParameter.of("continuations", "each must have a token, and one before it")
    params = SamplingParams(temperature=0.0, max_tokens=0, logprobs=1, prompt_logprobs=True)
    return Plan(Request(prompts, [params] * len(prompts), terms=terms), scored_from=tuple(begins))


def _plan(body: ScoringBody, prompts: list[list[int]], begins: list[int]) -> Plan:
    plan = scoring_plan(prompts, begins, Terms(body.user or "", body.priority or 0))
    if (num_tokens := sum(map(len, prompts))) * 2 > MAX_PROMPT_LOGPROBS:
        raise InvalidParameter.of(
            "continuations",
            f"the prompt's tokens, once for each continuation, and the continuations' may be "
            f"{MAX_PROMPT_LOGPROBS // 2}, not {num_tokens}",
        )
    return plan


def scored(stream: SequenceStream, begin: int) -> tuple[list[int], list[float], bool]:
    """The tokens of the continuation that begins there, their log-probabilities, and whether greedy decoding writes them."""
    entries = stream.prompt_logprobs[begin - 1 :]
    is_greedy = all(entry.logprob == entry.top[0][1] for entry in entries)
    return stream.prompt_tokens[begin:], [entry.logprob for entry in entries], is_greedy


class ScoreSerializer:
    """Writes the answer of /v1/score: for each continuation its log-likelihood, and whether greedy decoding would write it."""

    id_prefix: ClassVar[str] = "score-"

    def __init__(self, engine: Engine, plan: Plan, streams: Sequence[SequenceStream]) -> None:
        self._engine = engine
        self._plan = plan
        self._streams = streams

    def whole(self, choices: Sequence[CollectedChoice]) -> Sliced[bytes]:
        """The answer as JSON, made in slices. The choices have no tokens."""
        scored = []
        for index in range(len(choices)):
            if index:
                yield
            scored.append(self._scored(index))
        head = {"id": f"{self.id_prefix}{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        head["model"] = self._engine.model_id
        return msgspec.json.encode(head | {"data": self._data(scored), "usage": usage_of(self._plan, self._streams, 0)})

    def _data(self, scored: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return scored

    def _scored(self, index: int) -> dict[str, Any]:
        tokens, logprobs, is_greedy = scored(self._streams[index], self._plan.scored_from[index])
        return {
            "index": index,
            "object": "score",
            "score": math.fsum(logprobs),
            "num_tokens": len(tokens),
            "is_greedy": is_greedy,
            "tokens": tokens,
            "token_logprobs": logprobs,
        }


class ClassifySerializer(ScoreSerializer):
    """Writes the answer of /v1/classify: the likeliest label, and every label's probability among them."""

    id_prefix = "classify-"

    def _data(self, scored: list[dict[str, Any]]) -> list[dict[str, Any]]:
        body: ClassifyBody = self._plan.form
        labels = body.labels
        scores = [one["score"] / (one["num_tokens"] if body.normalize else 1) for one in scored]
        likeliest = max(range(len(scores)), key=scores.__getitem__)
        weights = [math.exp(score - scores[likeliest]) for score in scores]
        probs = [weight / math.fsum(weights) for weight in weights]
        each = [
            {"label": label, "prob": prob, "score": one["score"], "num_tokens": one["num_tokens"]}
            for label, prob, one in zip(labels, probs, scored, strict=True)
        ]
        found = {"index": 0, "label": labels[likeliest], "probs": probs, "num_classes": len(labels)}
        return [{**found, "labels": each}]
