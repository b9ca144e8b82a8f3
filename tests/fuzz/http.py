"""Sends generated requests to the application in this process, many at once, and judges each answer.

After each batch the engine, which has no model, must be idle. `tests/programs/clients/schemathesis_run.py` fuzzes a server.
"""

import asyncio
from collections.abc import Iterator

import h11
import httpx

from deployments.http.app import build_http_app
from deployments.http.request_id import TIMEOUT_HEADER
from deployments.observe.metrics import Metrics
from deployments.openai.errors import is_anthropic
from tests.fuzz.messages import GENERATION, MARK, Message, cheap, made
from tests.fuzz.outcome import Outcome
from tests.support.scripted_engine import FakeEngine

CONCURRENCY = 16
MOST_ERROR_BYTES = 1000
REFUSALS = {400, 403, 404, 405, 408, 413, 415, 429}
LEAKS = (MARK, "Traceback", "pydantic", 'File "', "site-packages")


def _judge_anthropic_error(answer: httpx.Response) -> str | None:
    try:
        body = answer.json()
        is_usual = set(body) == {"type", "error", "request_id"} and set(body["error"]) == {"type", "message"}
        texts = [body["type"], body["request_id"], *body["error"].values()]
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"status {answer.status_code} without an error object"
    return None if is_usual and all(isinstance(text, str) and text for text in texts) else "an error of another shape"


def judge(message: Message, answer: httpx.Response) -> str | None:
    """The fault of the answer; None if there is none."""
    status, text = answer.status_code, answer.text
    if status < 400:
        return _judge_success(message, answer)
    if status >= 500 and not (status == 504 and message.has(TIMEOUT_HEADER.encode())):
        return f"status {status}"
    if status not in REFUSALS | {504}:
        return f"status {status} is not documented"
    if leak := next((leak for leak in LEAKS if leak in text), None):
        return f"{leak!r} in an error"
    if len(answer.content) > MOST_ERROR_BYTES:
        return f"an error of {len(answer.content)} bytes"
    if message.method == "HEAD":
        return None
    if is_anthropic({"path": message.path.partition("?")[0]}):
        return _judge_anthropic_error(answer)
    try:
        body = answer.json()
        error = body["error"]
        is_usual = set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}
    except (ValueError, TypeError, KeyError):
        return f"status {status} without an error object"
    is_usual = is_usual and all(isinstance(error[name], str) and error[name] for name in ("message", "type", "code"))
    if not is_usual or not isinstance(error["param"], str | None):
        return "an error of another shape"
    return None


def _judge_success(message: Message, answer: httpx.Response) -> str | None:
    if message.path not in GENERATION or answer.status_code != 200:
        return None
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
        is_whole = bool(events) and (events[-1] == "data: [DONE]" or '"error"' in events[-1])
        return None if is_whole else "a stream without an end"
    return None if answer.json().get("choices") else "an answer without choices"


async def fuzz(cases: int, seed: int) -> Outcome:
    """Sends every message once. After every batch the canary request gets its first answer again, and the engine is idle."""
    outcome, engine = Outcome("http"), FakeEngine()
    transport = httpx.ASGITransport(build_http_app(engine, Metrics(in_ray=False)))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        expected = await canary(client)
        for batch in made(cases, seed):
            waiting = iter(batch)
            await asyncio.gather(*(_send_each(client, waiting, outcome) for _ in range(CONCURRENCY)))
            if (answer := await canary(client)) != expected:
                outcome.found(f"the canary request got {answer!r}, not {expected!r}, after {batch[-1]}")
            if not engine.live() or not all(stream.ended for stream in engine.streams):
                outcome.found(f"the engine is not idle after {batch[-1]}")
            engine.streams.clear()
    return outcome


async def _send_each(client: httpx.AsyncClient, messages: Iterator[Message], outcome: Outcome) -> None:
    for message in messages:
        content = cheap(message.path, message.body)
        url = client.base_url.copy_with(raw_path=message.path.encode("latin-1", "replace"))
        try:
            request = client.build_request(message.method, url, content=content, headers=list(message.headers))
            answer = await client.send(request)
        except (httpx.LocalProtocolError, h11.LocalProtocolError):
            outcome.case("no HTTP")  # the client cannot send it
            continue
        except Exception as error:
            outcome.case(type(error).__name__)
            outcome.found(f"{type(error).__name__}: {error}: {message}")
            continue
        outcome.case(str(answer.status_code))
        if (fault := judge(message, answer)) is not None:
            outcome.found(f"{fault}: {message}: {answer.text[:600]!r}")


async def canary(client: httpx.AsyncClient) -> str:
    body = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 12}
    answer = await client.post("/v1/chat/completions", json=body)
    return str(answer.json()["choices"][0]["message"]["content"]) if answer.status_code == 200 else answer.text


def run(cases: int, seed: int) -> Outcome:
    return asyncio.run(fuzz(cases, seed))
