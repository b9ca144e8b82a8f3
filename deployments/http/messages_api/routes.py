"""The routes of Anthropic's API."""

from starlette.requests import Request
from starlette.responses import Response

from deployments.engine.interface import Models
from deployments.http.generation_kinds import GenerationKind
from deployments.http.messages_api.answer import MessagesSerializer, plan_messages
from deployments.http.messages_api.schemas import CountTokensBody, MessagesBody
from deployments.http.request_body import BodyReader
from deployments.http.routes import BODY_STATUSES, check_takes_requests
from deployments.http.routing import ApiRoute
from deployments.openai.answers import schemas as answer_schemas
from deployments.openai.errors import json_response
from deployments.openai.plan import encode_chat, engine_of
from deployments.openai.prompt_encoder import PromptEncoder

MESSAGES = GenerationKind(
    "/v1/messages",
    "Messages",
    "Anthropic's API: system and messages as content blocks, tools with `input_schema`, streams of named events.",
    MessagesBody,
    plan_messages,
    MessagesSerializer,
    answer_schemas.AnthropicMessage,
    reads_body=True,
)


def count_tokens_route(engine: Models, bodies: BodyReader, encoder: PromptEncoder) -> ApiRoute:
    async def count_tokens(request: Request) -> Response:
        check_takes_requests(engine)
        async with bodies.received(request) as raw:
            body = await bodies.parse(raw, CountTokensBody)
        own = encoder.of("", engine_of(engine, body.model))
        with body.chat.in_the_clients_words():
            tokens = await encode_chat(body.chat.body, own)
        return json_response({"input_tokens": len(tokens)})

    return ApiRoute(
        "/v1/messages/count_tokens",
        count_tokens,
        method="POST",
        tag="generation",
        summary="Count tokens",
        description="Tokens of the prompt that a body of /v1/messages makes, tools included.",
        body=CountTokensBody,
        answer=answer_schemas.InputTokens,
        statuses=BODY_STATUSES,
    )
