"""The differences between the generating and scoring routes: body, planning and answer."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from deployments.engine.interface import Engine, TokenStream
from deployments.openai.answers import schemas as answer_schemas
from deployments.openai.answers.answer import WholeSerializer
from deployments.openai.answers.openai_answers import CompletionSerializer
from deployments.openai.answers.parsed_chat import chat_serializer
from deployments.openai.field_types import Body
from deployments.openai.plan import Plan, plan_chat, plan_completion
from deployments.openai.prompt_encoder import PromptEncoder
from deployments.openai.schemas import ChatBody, CompletionBody
from deployments.openai.score import (
    ClassifyBody,
    ClassifySerializer,
    ScoreBody,
    ScoreSerializer,
    plan_classify,
    plan_score,
)

BodyT = TypeVar("BodyT", bound=Body)


@dataclass(frozen=True, slots=True)
class GenerationKind(Generic[BodyT]):
    """The differences between the generation routes: body, planning, answer."""

    path: str
    summary: str
    description: str
    body: type[BodyT]
    plan: Callable[[BodyT, Engine, PromptEncoder], Awaitable[Plan]]
    serializer: Callable[[Engine, Plan, Sequence[TokenStream], BodyT], WholeSerializer]
    answer: type
    generates: bool = True
    reads_body: bool = False  # the serializer does, which keeps the body as long as the answer


def _without_body(
    serializer: Callable[[Engine, Plan, Sequence[TokenStream]], WholeSerializer],
) -> Callable[[Engine, Plan, Sequence[TokenStream], Body], WholeSerializer]:
    """For an answer whose form depends on the plan alone."""
    return lambda engine, plan, streams, _: serializer(engine, plan, streams)


COMPLETIONS = GenerationKind(
    "/v1/completions",
    "Completions",
    "Continue each prompt. `max_tokens` is 16 unless given.",
    CompletionBody,
    plan_completion,
    _without_body(CompletionSerializer),
    answer_schemas.Completion,
)
CHAT = GenerationKind(
    "/v1/chat/completions",
    "Chat Completions",
    "Answer a dialog: optional system message, then user and assistant in turn. May fill the context unless limited.",
    ChatBody,
    plan_chat,
    _without_body(chat_serializer),
    answer_schemas.ChatCompletion,
)

SCORE = GenerationKind(
    "/v1/score",
    "Score",
    "The log-likelihood of each continuation after the prompt, by token and in sum. Nothing is generated.",
    ScoreBody,
    plan_score,
    _without_body(ScoreSerializer),
    answer_schemas.Scores,
    generates=False,
)
CLASSIFY = GenerationKind(
    "/v1/classify",
    "Classify",
    "The likeliest of the labels as the continuation of a prompt or the answer to a chat.",
    ClassifyBody,
    plan_classify,
    _without_body(ClassifySerializer),
    answer_schemas.Classes,
    generates=False,
)
