"""JSON schemas of the answers, for the OpenAPI document. Tests compare them with what the routes answer.

A schema with a title is a component of the document by that name, of which generators of clients make a class.
"""

from typing import Any, Final

Schema = dict[str, Any]

_STRING: Final[Schema] = {"type": "string"}
_TEXT_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_NUMBER: Final[Schema] = {"type": "number"}
_OBJECT_OR_NULL: Final[Schema] = {"type": ["object", "null"]}
_FINISH: Final[Schema] = {"type": ["string", "null"]}


def _object(**properties: Schema) -> Schema:
    """An object that has all of these and may have more."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _named(title: str, **properties: Schema) -> Schema:
    return {"title": title, **_object(**properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _optional(schema: Schema, **properties: Schema) -> Schema:
    """The schema, whose object may have these properties too."""
    schema["properties"] |= properties
    return schema


_USAGE: Final = _named(
    "Usage",
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
_TOKEN_IDS: Final = _list(_COUNT)
_OF_PROMPT: Final = {"prompt_token_ids": _TOKEN_IDS, "prompt_logprobs": _list(_OBJECT_OR_NULL)}
_FUNCTION: Final = _object(name=_STRING, arguments=_STRING)
_MESSAGE: Final = _optional(
    _object(role={"const": "assistant"}, content=_TEXT_OR_NULL, refusal=_TEXT_OR_NULL),
    reasoning_content=_STRING,
    reasoning=_STRING,
    tool_calls=_list(_object(id=_STRING, type={"const": "function"}, function=_FUNCTION)),
    function_call=_FUNCTION,
)


def _choice(**fields: Schema) -> Schema:
    choice = _object(index=_COUNT, **fields, logprobs=_OBJECT_OR_NULL, finish_reason=_FINISH)
    return _optional(choice, token_ids=_TOKEN_IDS, stop_reason={"type": ["string", "integer", "null"]})


def _generated(title: str, kind: str, choice: Schema) -> Schema:
    names = _named(
        title, id=_STRING, object={"const": kind}, created=_COUNT, model=_STRING, choices=_list(choice), usage=_USAGE
    )
    return _optional(names, system_fingerprint=_STRING, service_tier=_STRING)


COMPLETION: Final = _generated("Completion", "text_completion", _optional(_choice(text=_STRING), **_OF_PROMPT))
CHAT_COMPLETION: Final = _optional(
    _generated("ChatCompletion", "chat.completion", _choice(message=_MESSAGE)), **_OF_PROMPT
)


def _scored(title: str, **item: Schema) -> Schema:
    data = _list(_object(index=_COUNT, **item))
    return _named(title, id=_STRING, object={"const": "list"}, created=_COUNT, model=_STRING, data=data, usage=_USAGE)


SCORES: Final = _scored(
    "Scores",
    score=_NUMBER,
    num_tokens=_COUNT,
    is_greedy={"type": "boolean"},
    tokens=_TOKEN_IDS,
    token_logprobs=_list(_NUMBER),
)
CLASSES: Final = _scored(
    "Classes",
    label=_STRING,
    probs=_list(_NUMBER),
    num_classes=_COUNT,
    labels=_list(_object(label=_STRING, prob=_NUMBER, score=_NUMBER, num_tokens=_COUNT)),
)
MODEL: Final = _named(
    "Model",
    id=_STRING,
    object={"const": "model"},
    created=_COUNT,
    owned_by=_STRING,
    root=_STRING,
    parent={"type": "null"},
    max_model_len=_COUNT,
    type={"const": "model"},
    display_name=_STRING,
    created_at={"type": "string", "format": "date-time"},
    lifecycle={"const": "active"},
    max_input_tokens=_COUNT,
    max_tokens=_COUNT,
)
MODELS: Final = _named(
    "ModelList",
    object={"const": "list"},
    data=_list(MODEL),
    has_more={"type": "boolean"},
    first_id=_STRING,
    last_id=_STRING,
)
TOKENS: Final = _named(
    "TokenizedText",
    count=_COUNT,
    max_model_len=_COUNT,
    tokens=_TOKEN_IDS,
    token_strs={"type": ["array", "null"], "items": _STRING},
)
LOAD: Final = _named("ServerLoad", server_load=_COUNT)
VERSION: Final = _named("Version", version=_STRING)
TEXT: Final = _named("DetokenizedText", prompt=_STRING)
TOKENIZER: Final = _named(
    "TokenizerInfo",
    bos_token=_TEXT_OR_NULL,
    eos_token=_STRING,
    chat_template=_TEXT_OR_NULL,
    vocab_size=_COUNT,
    max_model_len=_COUNT,
)
HEALTH: Final = _named("Health", status=_STRING)
READINESS: Final = _named("Readiness", ready={"type": "boolean"}, phase=_STRING, detail=_STRING)
PROPERTIES: Final = _named("ServerProperties", model=_STRING, phase=_STRING, max_seq_len=_COUNT)
METRICS: Final = _STRING
# No type: some programs compare the text of all events with it, some each event as an object.
EVENTS: Final[Schema] = {"description": "server-sent events"}
ERROR: Final = _named("Error", error=_object(message=_STRING, type=_STRING, param=_TEXT_OR_NULL, code=_STRING))
_INPUT_AND_OUTPUT = _object(input_tokens=_COUNT, output_tokens=_COUNT)
ANTHROPIC_MESSAGE: Final = _named(
    "AnthropicMessage",
    id=_STRING,
    type={"const": "message"},
    role={"const": "assistant"},
    model=_STRING,
    content=_list(_object(type=_STRING)),
    stop_reason=_TEXT_OR_NULL,
    stop_sequence=_TEXT_OR_NULL,
    usage=_INPUT_AND_OUTPUT,
)
INPUT_TOKENS: Final = _named("InputTokens", input_tokens=_COUNT)
RESPONSE: Final = _named(
    "ResponseObject",
    id=_STRING,
    object={"const": "response"},
    created_at=_NUMBER,
    status=_STRING,
    model=_STRING,
    output=_list(_object(type=_STRING)),
    usage=_INPUT_AND_OUTPUT,
)
ANTHROPIC_ERROR: Final = _named(
    "AnthropicError", type={"const": "error"}, error=_object(type=_STRING, message=_STRING), request_id=_STRING
)
