"""The route of OpenAI's responses."""

from deployments.http.generation_kinds import GenerationKind
from deployments.http.responses_api.answer import ResponsesSerializer, plan_response
from deployments.http.responses_api.schemas import ResponsesBody
from deployments.openai.answers import schemas as answer_schemas

RESPONSES = GenerationKind(
    "/v1/responses",
    "Responses",
    "OpenAI's newer API, without state: input items, flat function tools, `text.format`, streams of typed events.",
    ResponsesBody,
    plan_response,
    ResponsesSerializer,
    answer_schemas.ResponseObject,
    reads_body=True,
)
