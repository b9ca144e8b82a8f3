"""The types of the answers, of which `openapi.py` makes schemas. Tests compare them with what the routes answer.

An answer may have more fields. Generators of clients make a class of each type.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

Count = Annotated[int, Field(ge=0)]
Logprobs = dict[str, Any] | None


class PromptTokensDetails(TypedDict):
    cached_tokens: Count


class Usage(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    function_call: NotRequired[CalledFunction]


class Choice(TypedDict):
    index: Count
    logprobs: Logprobs
    finish_reason: str | None
    token_ids: NotRequired[list[Count]]
    stop_reason: NotRequired[str | int | None]


class CompletionChoice(Choice):
    text: str
    prompt_token_ids: NotRequired[list[Count]]
    prompt_logprobs: NotRequired[list[Logprobs]]


class ChatChoice(Choice):
    message: AnswerMessage


class Generated(TypedDict):
    id: str
    created: Count
    model: str
    usage: Usage
    system_fingerprint: NotRequired[str]
    service_tier: NotRequired[str]


class Completion(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[Count]]
    prompt_logprobs: NotRequired[list[Logprobs]]


class ScoredContinuation(TypedDict):
    index: Count
    score: float
    num_tokens: Count
    is_greedy: bool
    tokens: list[Count]
    token_logprobs: list[float]


class Scores(Generated):
    object: Literal["list"]
    data: list[ScoredContinuation]


class Label(TypedDict):
    label: str
    prob: float
    score: float
    num_tokens: Count


class Classified(TypedDict):
    index: Count
    label: str
    probs: list[float]
    num_classes: Count
    labels: list[Label]


class Classes(Generated):
    object: Literal["list"]
    data: list[Classified]


class Embedded(TypedDict):
    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingsUsage(TypedDict):
    prompt_tokens: Count
    total_tokens: Count


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedded]
    model: str
    usage: EmbeddingsUsage


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: None
    max_model_len: Count | None
    status: Literal["ready", "sleeping"]
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: Count | None
    max_tokens: Count | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]
    has_more: bool
    first_id: str
    last_id: str


class TokenizedText(TypedDict):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class DetokenizedText(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    bos_token: str | None
    eos_token: str
    chat_template: str | None
    vocab_size: Count
    max_model_len: Count


class ServerLoad(TypedDict):
    server_load: Count


class Version(TypedDict):
    version: str


class Health(TypedDict):
    status: str


class ServerReadiness(TypedDict):
    ready: bool
    phase: str
    detail: str


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class Error(TypedDict):
    error: ErrorObject


class TokenUsage(TypedDict):
    input_tokens: Count
    output_tokens: Count


class TypedPart(TypedDict):
    type: str


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TypedPart]
    stop_reason: str | None
    stop_sequence: str | None
    usage: TokenUsage


class InputTokens(TypedDict):
    input_tokens: Count


class AnthropicErrorObject(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


class ResponseObject(TypedDict):
    id: str
    object: Literal["response"]
    created_at: float
    status: str
    model: str
    output: list[TypedPart]
    usage: TokenUsage
