"""Generates malformed HTTP requests: raw bodies, wrong fields, odd headers and routes."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from deployments.http.schemas import ChatBody, CompletionBody
from deployments.http.tokenizer_schemas import DetokenizeBody, TokenizeBody
from deployments.http.unsupported import CHAT_NEUTRAL

MARK = "ECHO-OF-THE-INPUT"  # in generated texts; no error may repeat it
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATION = (CHAT, COMPLETIONS)
MOST_NEW_TOKENS = 2  # of a request that happens to be valid, which must be short
_MOST_BYTES_PARSED = 100_000
_BATCH = 500  # requests of one run of hypothesis, which keeps all of its examples
_CROSSINGS = 2  # crossings of two requests for each request from hypothesis: a crossing takes a tenth of the time


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
    if path not in GENERATION or len(body) > _MOST_BYTES_PARSED:
        return body
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(raw, dict):
        return body
    changes: dict[str, int] = {}
    limits = [name for name in ("max_tokens", "max_completion_tokens") if raw.get(name) is not None]
    if not limits:
        changes["max_tokens"] = MOST_NEW_TOKENS
    for name, most in [*((limit, MOST_NEW_TOKENS) for limit in limits), ("n", 2), ("best_of", 2)]:
        if type(raw.get(name)) is int and most < raw[name] <= 2**31:
            changes[name] = most
    return json.dumps(raw | changes).encode() if changes else body


VALID: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [{"prompt": "Once upon a time"}, {"prompt": [5, 6, 7], "echo": True, "logprobs": 2}, {"prompt": ["a", "b"]}],
    CHAT: [{"messages": [{"role": "user", "content": "Who are you?"}]}],
    "/tokenize": [{"prompt": "some text"}, {"messages": [{"role": "user", "content": "hi"}]}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
}  # fmt: skip
FIELDS: dict[str, list[str]] = {
    COMPLETIONS: sorted({*CompletionBody.model_fields, *CHAT_NEUTRAL}),
    CHAT: sorted({*ChatBody.model_fields, *CHAT_NEUTRAL}),
    "/tokenize": sorted(TokenizeBody.model_fields),
    "/detokenize": sorted(DetokenizeBody.model_fields),
}
OTHER_ROUTES = (
    "/", "/docs", "/openapi.json", "/health", "/ready", "/props", "/metrics", "/tokenizer_info", "/v1/models",
    "/v1/models/x", "/v1/embeddings", "/v1", "//", "/v1/models/%00", "/v1/models/%FF%FE", "/v1/models/../../etc/passwd",
    "/v1/completions/", "/tokenize/", "/%2e%2e/", "/v1/chat/completions%0d%0aX: y", "/?" + "a=b&" * 500, "/" + "x" * 3000,
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW")

_texts = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(codec=None), max_size=10),  # lone surrogates among them
    st.text(st.characters(max_codepoint=0x1F), min_size=1, max_size=4),
    st.sampled_from(
        ["", MARK, "\x00", "\ud800", "\ufeff", "\u202e", "[INST]", "<<SYS>>", "</s>", "\r\nlog", "é" * 300]
    ),
    st.sampled_from([MARK * 20, MARK * 2000, "🦙" * 600, " " * 5000, "{{7*7}}", "%s%n", "../../../etc/passwd"]),
)
_numbers = st.one_of(
    st.integers(-3, 130),
    st.integers(),
    st.sampled_from([0, -1, 1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400]),
    st.floats(),
    st.sampled_from([0.0, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 1e-320, float("nan"), float("-inf")]),
)
_leaves = st.one_of(st.none(), st.booleans(), _numbers, _texts)
values = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
# JSON text that no library writes, in place of a value.
_raw_values = st.sampled_from(
    ["NaN", "-Infinity", "1e999", "-1e99999", "9" * 5000, "0." + "1" * 3000, "01", "+1", "0x10", "1e", "'x'", "undefined",
     '"\\ud800"', '"\\u0000"', '"\x01"', '"\\x"', "[1,]", '{"a":1,}', "[" * 3000, '{"a":' * 3000, "[" * 900 + "]" * 900,
     '{"a":' * 500 + "1" + "}" * 500, "[" * 150 + "]" * 150, "tru", "nul", "\xff", "/**/1", '"' + "x" * 70_000 + '"']
)  # fmt: skip
_headers = st.sampled_from(
    [(b"content-type", b"text/plain"), (b"content-type", b"application/json; charset=utf-16"), (b"content-type", b""),
     (b"content-type", b"application/" + b"x" * 3000 + b"+json"), (b"content-type", b"multipart/form-data; boundary=\xff"),
     (b"x-request-id", b"../../" + b"a" * 5000), (b"x-request-id", b"\xff\xfe\x80"), (b"x-request-id", b"a b;c\tmark"),
     (b"x-request-timeout-seconds", b"NaN"), (b"x-request-timeout-seconds", b"-1"), (b"x-request-timeout-seconds", b"1e999"),
     (b"x-request-timeout-seconds", b"1e-9"), (b"x-request-timeout-seconds", b"\xe9"), (b"x-request-timeout-seconds", b"1_0"),
     (b"authorization", b"Bearer " + b"k" * 5000), (b"authorization", b"\xff"), (b"accept", b"text/event-stream;q=nonsense"),
     (b"accept-encoding", b"gzip;q=0, br;q=zzz"), (b"expect", b"nothing"), (b"range", b"bytes=0-1,5-,-9"),
     (b"cookie", b"a=" + b"\x80" * 500), (b"origin", b"null"), (b"content-encoding", b"gzip"), (b"x-forwarded-for", b"::1, x"),
     (b"transfer-encoding", b"chunked"), (b"content-length", b"+5"), (b"content-length", b"99999999999999999999"),
     (b"host", b"evil.example"), (b"host", b"[::1"), (b"host", b"\xff")]
)  # fmt: skip
_JSON = (b"content-type", b"application/json")


def _dump(value: object) -> bytes:
    """JSON as clients write it: surrogates and control characters escaped, NaN unquoted."""
    return json.dumps(value).encode()


@st.composite
def bodies_with_wrong_fields(draw: st.DrawFn) -> Message:
    path = draw(st.sampled_from(list(VALID)))
    body = dict(draw(st.sampled_from(VALID[path])))
    for name in draw(st.lists(st.sampled_from(FIELDS[path]) | st.text(max_size=10), min_size=1, max_size=3)):
        body[name] = draw(values)
    if draw(st.booleans()):
        body["stream"] = draw(st.booleans())
    return Message("fields", "POST", path, _dump(body))


@st.composite
def bodies_with_raw_values(draw: st.DrawFn) -> Message:
    path = draw(st.sampled_from(list(VALID)))
    name, text = draw(st.sampled_from(FIELDS[path])), draw(_raw_values)
    whole = _dump(VALID[path][0])[:-1] + f', "{name}": {text}}}'.encode("latin-1")
    return Message("raw values", "POST", path, whole if draw(st.booleans()) else text.encode("latin-1"))


@st.composite
def bodies_that_were_damaged(draw: st.DrawFn) -> Message:
    path = draw(st.sampled_from(list(VALID)))
    body = bytearray(_dump(draw(st.sampled_from(VALID[path]))))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body)))
        how = draw(st.integers(0, 3))
        if how == 0:
            del body[at:]
        elif how == 1:
            body[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif how == 2 and at < len(body):
            body[at] ^= 1 << draw(st.integers(0, 7))
        else:
            body[at:at] = body[: draw(st.integers(0, 40))]
    return Message("damaged", "POST", path, bytes(body))


@st.composite
def bodies_of_other_kinds(draw: st.DrawFn) -> Message:
    body = _dump(draw(values)) if draw(st.booleans()) else draw(st.binary(max_size=200))
    return Message("not an object", "POST", draw(st.sampled_from(list(VALID))), body)


@st.composite
def odd_headers(draw: st.DrawFn) -> Message:
    path = draw(st.sampled_from(list(VALID)))
    headers = [_JSON, *draw(st.lists(_headers, min_size=1, max_size=3))]
    if any(name == b"content-type" for name, _ in headers[1:]):
        del headers[0]
    return Message("headers", "POST", path, _dump(draw(st.sampled_from(VALID[path]))), tuple(headers))


@st.composite
def odd_routes(draw: st.DrawFn) -> Message:
    path = draw(st.sampled_from(OTHER_ROUTES) | st.sampled_from(list(VALID)))
    method, body = draw(st.sampled_from(METHODS)), draw(st.sampled_from([b"", b"{}", b"\xff", b"[" * 100]))
    return Message("routes", method, path, body)


@st.composite
def odd_dialogs(draw: st.DrawFn) -> Message:
    """Dialogs with messages in any order, of any role, some with contents that are not text."""
    roles = st.sampled_from(["user", "assistant", "system", "developer", "tool", MARK]) | values
    part = st.fixed_dictionaries({"type": st.just("text") | values, "text": values})
    content = _texts | st.lists(part, max_size=3) | values
    more = {"tool_calls": values, "name": values}
    message = st.fixed_dictionaries({"role": roles, "content": content}, optional=more)
    path = draw(st.sampled_from([CHAT, "/tokenize"]))
    body = {"messages": draw(st.lists(message, max_size=4)), "stream": draw(st.booleans())}
    return Message("dialogs", "POST", path, _dump(body))


ANY = st.one_of(
    bodies_with_wrong_fields(), bodies_with_wrong_fields(), bodies_with_raw_values(), bodies_that_were_damaged(),
    bodies_of_other_kinds(), odd_headers(), odd_routes(), odd_dialogs(),
)  # fmt: skip


_ONLY_MAKE = settings(database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


def collect(strategy: st.SearchStrategy[Any], count: int, seed_: int, take: Callable[[Any], None]) -> None:
    """Passes at most `count` examples to `take`; the same ones for the same seed."""

    @seed(seed_)
    @settings(_ONLY_MAKE, max_examples=count)
    @given(strategy)
    def make(example: Any) -> None:
        take(example)

    make()


def made(count: int, seed_: int) -> Iterator[list[Message]]:
    """Messages of every kind, in batches. Hypothesis generates a third of them; the others are crossings of those."""
    left, number = count, 0
    while left > 0:
        batch: list[Message] = []
        collect(ANY, min(-(-left // (1 + _CROSSINGS)), _BATCH), seed_ * 1_000_003 + number, batch.append)
        batch += crossed(batch, min(left - len(batch), _CROSSINGS * len(batch)), Random(seed_ * 1_000_003 + number))
        yield batch
        left, number = left - len(batch), number + 1


def crossed(messages: list[Message], count: int, draw: Random) -> list[Message]:
    """`count` messages, each with some fields of one message among those of another, sometimes with the other's headers."""
    parents = [(message, fields) for message in messages if (fields := _fields(message))]
    children = []
    for _ in range(count if parents else 0):
        mother, own = draw.choice(parents)
        father, other = draw.choice(parents)
        names = draw.sample(list(other), draw.randint(1, min(3, len(other))))
        body = _dump(own | {name: other[name] for name in names})
        headers = father.headers if draw.random() < 0.1 else mother.headers
        children.append(Message("crossed", "POST", mother.path, body, headers))
    return children


def _fields(message: Message) -> dict[str, Any] | None:
    """The fields of a message's body, if the body is an object."""
    if message.method != "POST" or message.path not in VALID or len(message.body) > _MOST_BYTES_PARSED:
        return None
    try:
        body = json.loads(message.body)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
