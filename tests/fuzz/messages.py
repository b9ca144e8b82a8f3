"""Generates malformed HTTP requests: raw bodies, wrong fields, odd headers and routes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from deployments.http.messages_api.schemas import MessagesBody
from deployments.http.responses_api.schemas import ResponsesBody
from deployments.http.routes import DetokenizeBody, TokenizeBody
from deployments.openai.embeddings import EmbeddingsBody
from deployments.openai.schemas import ChatBody, CompletionBody
from deployments.openai.score import ClassifyBody, ScoreBody
from deployments.openai.unsupported import CHAT_NEUTRAL
from tests.fuzz.json_damage import VALUES as ANY_VALUES
from tests.fuzz.json_damage import damage_json

MARK = "ECHO-OF-THE-INPUT"  # in generated texts; no error may repeat it
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATION = (CHAT, COMPLETIONS)
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
MOST_NEW_TOKENS = 2  # of a request that happens to be valid, which must be short
_MOST_BYTES_PARSED = 100_000
_BATCH = 500  # requests between two looks at the server's state


@dataclass(frozen=True)
class Message:
    """One request as sent. `kind` names its generator."""

    kind: str
    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)

    def has(self, name: bytes) -> bool:
        return any(key.lower() == name for key, _ in self.headers)

    def __str__(self) -> str:
        headers = [(name.decode("latin-1"), value[:60]) for name, value in self.headers]
        return f"{self.kind}: {self.method} {self.path[:200]} {headers} {self.body[:600]!r} ({len(self.body)} bytes)"


def cheap(path: str, body: bytes) -> bytes:
    """The same body with limits on tokens and choices, so that a valid request takes little time."""
    if path not in (*GENERATION, RESPONSES, MESSAGES) or len(body) > _MOST_BYTES_PARSED:
        return body
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(raw, dict):
        return body
    changes: dict[str, int] = {}
    names = ("max_output_tokens",) if path == RESPONSES else ("max_tokens", "max_completion_tokens")
    limits = [name for name in names if raw.get(name) is not None]
    if not limits:
        changes[names[0]] = MOST_NEW_TOKENS
    for name, most in [*((limit, MOST_NEW_TOKENS) for limit in limits), ("n", 2), ("best_of", 2)]:
        if type(raw.get(name)) is int and most < raw[name] <= 2**31:
            changes[name] = most
    return json.dumps(raw | changes).encode() if changes else body


VALID: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [{"prompt": "Once upon"}, {"prompt": [5, 6, 7], "echo": True, "logprobs": 2}, {"prompt": ["a", "b"]}],
    CHAT: [{"messages": [{"role": "user", "content": "Who are you?"}]}],
    RESPONSES: [{"input": "hi"}, {"input": [{"role": "user", "content": "hi"}], "instructions": "Be brief."}],
    MESSAGES: [{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}],
    "/v1/embeddings": [{"input": "a"}, {"input": [[5, 6], [7]], "encoding_format": "base64", "dimensions": 2}],
    "/v1/score": [{"prompt": "a", "continuations": ["b", "c"]}],
    "/v1/classify": [{"prompt": "a", "labels": ["b", "c"]}],
    "/tokenize": [{"prompt": "some text"}, {"messages": [{"role": "user", "content": "hi"}]}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
}  # fmt: skip
FIELDS: dict[str, list[str]] = {
    COMPLETIONS: sorted({*CompletionBody.model_fields, *CHAT_NEUTRAL}),
    CHAT: sorted({*ChatBody.model_fields, *CHAT_NEUTRAL}),
    RESPONSES: sorted({*ResponsesBody.model_fields, *ResponsesBody.neutral}),
    MESSAGES: sorted({*MessagesBody.model_fields, *MessagesBody.neutral}),
    "/v1/embeddings": sorted(EmbeddingsBody.model_fields),
    "/v1/score": sorted(ScoreBody.model_fields),
    "/v1/classify": sorted(ClassifyBody.model_fields),
    "/tokenize": sorted(TokenizeBody.model_fields),
    "/detokenize": sorted(DetokenizeBody.model_fields),
}
OTHER_ROUTES = (
    "/", "/docs", "/openapi.json", "/health", "/ready", "/props", "/metrics", "/tokenizer_info", "/v1/models",
    "/v1/models/x", "/v1/rerank", "/v1", "//", "/v1/models/%00", "/v1/models/%FF%FE", "/v1/models/../../etc/passwd",
    "/v1/completions/", "/tokenize/", "/%2e%2e/", "/v1/chat/completions%0d%0aX: y", "/?" + "a=b&" * 500,
    "/" + "x" * 3000,
)  # fmt: skip
TIMEOUT = b"x-request-timeout-seconds"
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW")

VALUES = (
    *ANY_VALUES, MARK, MARK * 20, MARK * 2000, "\x00", "\ufeff", "\u202e", "[INST]", "<<SYS>>", "</s>", "\r\nlog",
    "é" * 300, "🦙" * 600, " " * 5000, "{{7*7}}", "%s%n", "user", "assistant", "system", "developer", "tool", 2**53 + 1,
    5e-324, [{"role": "user", "content": "a"}], [{"type": "text", "text": 5}], {"type": "json_object"}, {"name": "f"},
    -(2**63) - 1,
)  # fmt: skip
# JSON text that no library writes, in place of a value.
_RAW_VALUES = (
    "NaN", "-Infinity", "1e999", "-1e99999", "9" * 5000, "0." + "1" * 3000, "01", "+1", "0x10", "1e", "'x'",
    "undefined", '"\\ud800"', '"\\u0000"', '"\x01"', '"\\x"', "[1,]", '{"a":1,}', "[" * 3000, '{"a":' * 3000,
    "[" * 900 + "]" * 900, '{"a":' * 500 + "1" + "}" * 500, "[" * 150 + "]" * 150, "tru", "nul", "\xff", "/**/1",
    '"' + "x" * 70_000 + '"',
)  # fmt: skip
_HEADERS = (
    (b"content-type", b"text/plain"), (b"content-type", b"application/json; charset=utf-16"), (b"content-type", b""),
    (b"content-type", b"application/" + b"x" * 3000 + b"+json"),
    (b"content-type", b"multipart/form-data; boundary=\xff"), (b"x-request-id", b"../../" + b"a" * 5000),
    (b"x-request-id", b"\xff\xfe\x80"), (b"x-request-id", b"a b;c\tmark"),
    *((TIMEOUT, value) for value in (b"NaN", b"-1", b"1e999", b"1e-9", b"\xe9", b"1_0")), (b"expect", b"nothing"),
    (b"authorization", b"Bearer " + b"k" * 5000), (b"authorization", b"\xff"),
    (b"accept-encoding", b"gzip;q=0, br;q=zzz"), (b"accept", b"text/event-stream;q=nonsense"),
    (b"range", b"bytes=0-1,5-,-9"), (b"cookie", b"a=" + b"\x80" * 500), (b"origin", b"null"),
    (b"content-encoding", b"gzip"), (b"x-forwarded-for", b"::1, x"), (b"host", b"\xff"),
    (b"transfer-encoding", b"chunked"), (b"content-length", b"+5"), (b"content-length", b"99999999999999999999"),
    (b"host", b"evil.example"), (b"host", b"[::1"),
)  # fmt: skip
_JSON = (b"content-type", b"application/json")


def _message(draw: Random) -> Message:
    path, how = draw.choice(list(VALID)), draw.random()
    body = json.dumps(draw.choice(VALID[path]) | draw.choice(({}, {"stream": draw.random() < 0.5}))).encode()
    if how < 0.6:
        return Message("damaged", "POST", path, damage_json(body, draw, FIELDS[path], VALUES))
    if how < 0.75:
        text = draw.choice(_RAW_VALUES)
        whole = body[:-1] + f', "{draw.choice(FIELDS[path])}": {text}}}'.encode("latin-1")
        return Message("raw values", "POST", path, whole if draw.random() < 0.5 else text.encode("latin-1"))
    if how < 0.9:
        headers = draw.sample(_HEADERS, draw.randint(1, 3))
        has_type = any(name == b"content-type" for name, _ in headers)
        return Message("headers", "POST", path, body, (*(() if has_type else (_JSON,)), *headers))
    body = draw.choice((b"", b"{}", b"\xff", b"[" * 100))
    return Message("routes", draw.choice(METHODS), draw.choice((*OTHER_ROUTES, *VALID)), body)


def made(count: int, seed: int) -> Iterator[list[Message]]:
    """Messages of every kind, in batches; the same ones for the same seed."""
    for begin in range(0, count, _BATCH):
        numbers = range(begin, min(begin + _BATCH, count))
        yield [_message(Random(seed * 1_000_003 + number)) for number in numbers]
