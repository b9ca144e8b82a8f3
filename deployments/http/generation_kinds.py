"""The differences between the generating, embedding and scoring routes: body, planning and answer."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from deployments.engine.interface import Engine
from deployments.engine.sequence_stream import SequenceStream
from deployments.http.messages_api.answer import MessagesSerializer
from deployments.http.messages_api.schemas import MessagesBody
from deployments.http.responses_api.answer import ResponsesSerializer, plan_response
from deployments.http.responses_api.schemas import ResponsesBody
from deployments.openai import embeddings, score
from deployments.openai.answers import schemas as answers
from deployments.openai.answers.answer import WholeSerializer
from deployments.openai.answers.chats import chat_serializer
from deployments.openai.answers.completions import CompletionSerializer
from deployments.openai.field_types import Body
from deployments.openai.plan import Plan, plan_chat, plan_completion
from deployments.openai.prompt_encoder import PromptEncoder
from deployments.openai.schemas import ChatBody, CompletionBody

BodyT = TypeVar("BodyT", bound=Body)


@dataclass(frozen=True, slots=True)
class GenerationKind(Generic[BodyT]):
    """One route: body, planning, and what writes the answer. text: as `ApiRoute` has it."""

    path: str
    text: str
    body: type[BodyT]
    plan: Callable[[BodyT, Engine, PromptEncoder], Awaitable[Plan]]
    serializer: Callable[[Engine, Plan, Sequence[SequenceStream]], WholeSerializer]
    answer: type
    tag: str = "generation"


COMPLETIONS = GenerationKind(
    "/v1/completions",
    "Completions.\n\nContinue each prompt. `max_tokens` is 16 unless given.",
    CompletionBody,
    plan_completion,
    CompletionSerializer,
    answers.Completion,
)
CHAT = GenerationKind(
    "/v1/chat/completions",
    "Chat Completions.\n\n"
    "Answer a dialog: optional system message, then user and assistant in turn. May fill the context unless limited.",
    ChatBody,
    plan_chat,
    chat_serializer,
    answers.ChatCompletion,
)
MESSAGES = GenerationKind(
    "/v1/messages",
    "Messages.\n\n"
    "Anthropic's API: system and messages as content blocks, tools with `input_schema`, streams of named events.",
    MessagesBody,
    lambda body, engine, encoder: body.chat.plan(engine, encoder),
    MessagesSerializer,
    answers.AnthropicMessage,
)
RESPONSES = GenerationKind(
    "/v1/responses",
    "Responses.\n\n"
    "OpenAI's newer API, without state: input items, flat function tools, `text.format`, streams of typed events.",
    ResponsesBody,
    plan_response,
    ResponsesSerializer,
    answers.ResponseObject,
)
SCORE = GenerationKind(
    "/v1/score",
    "Score.\n\nThe log-likelihood of each continuation after the prompt, by token and in sum. Nothing is generated.",
    score.ScoreBody,
    score.plan_score,
    score.ScoreSerializer,
    answers.Scores,
    tag="scoring",
)
CLASSIFY = GenerationKind(
    "/v1/classify",
    "Classify.\n\nThe likeliest of the labels as the continuation of a prompt or the answer to a chat.",
    score.ClassifyBody,
    score.plan_classify,
    score.ClassifySerializer,
    answers.Classes,
    tag="scoring",
)
EMBEDDINGS = GenerationKind(
    "/v1/embeddings",
    "Embeddings.\n\nA vector of each text: pooled hidden states after the final norm.",
    embeddings.EmbeddingsBody,
    embeddings.plan_embeddings,
    embeddings.EmbeddingsSerializer,
    answers.Embeddings,
    tag="embeddings",
)
GENERATING: tuple[GenerationKind[Any], ...] = (COMPLETIONS, CHAT, MESSAGES, RESPONSES)
SCORING: tuple[GenerationKind[Any], ...] = (EMBEDDINGS, SCORE, CLASSIFY)
