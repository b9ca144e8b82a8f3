"""A server that exports traces and writes its log as JSON: spans at a collector, and every line of its log files."""

import asyncio
import json
import os
import re
import signal
from typing import Any

import httpx
import pytest

from tests.support import http
from tests.support.otlp_collector import Traced
from tests.support.waiting import until, wait_until

pytestmark = pytest.mark.timeout(600)

SECRET = "xylophone"
STAGES = {"queue", "tokenize_encode", "prefill_forward", "decode_step_forward", "sample_top_p", "decode_decode"}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def ask(traced: Traced, path: str, request_id: str, **body: Any) -> httpx.Response:
    headers = traced.server.headers | {"x-request-id": request_id} | body.pop("headers", {})
    return http.post(traced.server.url + path, json=body, headers=headers, timeout=120, trust_env=False)


def stages(traced: Traced, request_id: str) -> dict[str, int]:
    below = traced.collector.below(traced.collector.request(request_id))
    return {name: len(spans) for name, spans in below.items()}


def test_a_streamed_chat_and_a_completion_of_a_traced_caller_have_their_stages(traced: Traced) -> None:
    chat = [{"role": "user", "content": f"tell me of the {SECRET}"}]
    answer = ask(traced, "/v1/chat/completions", "chat", messages=chat, max_tokens=12, stream=True)
    assert answer.text.rstrip().endswith("[DONE]")
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}  # which the proxy hands on
    body: dict[str, Any] = {"prompt": SECRET, "n": 2, "max_tokens": 8, "ignore_eos": True}
    assert ask(traced, "/v1/completions", "two", **body, headers=headers).status_code == 200
    refused = ask(traced, "/v1/chat/completions", "refused", messages=chat, temperature=-1)
    assert refused.status_code == 400
    assert stages(traced, "chat") == dict.fromkeys([*STAGES, "stream"], 1)
    assert stages(traced, "two") == {"tokenize_encode": 1} | dict.fromkeys(STAGES - {"tokenize_encode"}, 2)
    assert stages(traced, "refused") == {"tokenize_encode": 1}
    assert traced.collector.request("refused").message == "invalid_parameter"
    two = traced.collector.request("two")
    assert two.attributes["gen_ai.usage.output_tokens"] == 16 and not two.is_error
    assert (two.trace_id, two.parent_id) == (TRACE, PARENT)
    (line,) = wait_until("the request's line is written", lambda: traced.of_request("two"))
    assert line["trace_id"] == TRACE
    (start,) = traced.collector.named("build/init")
    assert two.links == [start.trace_id]
    loads = traced.collector.below(start)["load_checkpoints"]
    assert {load.attributes["llama.rank"] for load in loads} == {0, 1}
    assert all(start.began_ns <= load.began_ns <= load.ended_ns <= start.ended_ns for load in loads)


def test_the_ranks_shares_of_steps_and_sampling_are_measured(traced: Traced) -> None:
    number = 0

    def has_shares() -> bool:
        nonlocal number
        number += 1
        name = f"measured-{number}"
        assert ask(traced, "/v1/completions", name, prompt="once", max_tokens=50, ignore_eos=True).status_code == 200
        span = traced.collector.request(name)
        shares = {attributes["llama.rank"]: attributes for event, _, attributes in span.events if event == "rank"}
        assert set(shares) == {0, 1} and all(share["llama.rank.share"] for share in shares.values())
        (sampling,) = traced.collector.below(span)["sample_top_p"]
        return sampling.seconds > 0 and all("llama.rank.step_ms" in share for share in shares.values())

    wait_until("the ranks' steps are measured", has_shares, pause_s=0.5)


async def test_a_disconnect_and_a_killed_rank_are_traced(traced: Traced) -> None:
    body = {"prompt": f"the {SECRET}", "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = traced.server.headers
    async with httpx.AsyncClient(base_url=traced.server.url, timeout=120, trust_env=False, headers=headers) as client:
        async with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "left"}) as answer:
            await anext(answer.aiter_bytes())
        left = await asyncio.to_thread(traced.collector.request, "left")
        assert left.attributes["error.type"] == "cancelled" and not left.is_error

        rank = (await client.get("/props")).json()["ranks"][1]["pid"]
        async with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "survivor"}) as answer:
            pieces = answer.aiter_bytes()
            received = await anext(pieces)
            os.kill(rank, signal.SIGKILL)
            async for piece in pieces:
                received = piece
        assert received.rstrip().endswith(b"[DONE]")
    survivor = await asyncio.to_thread(traced.collector.request, "survivor")
    events = [name for name, _, _ in survivor.events]
    assert events[:2] == ["ranks_failed", "ranks_replaced"] and not survivor.is_error
    assert survivor.attributes["gen_ai.usage.output_tokens"] == 400

    async def has_second_start() -> bool:
        return len(traced.collector.named("build/init")) == 2

    assert ask(traced, "/v1/completions", "after", prompt="once", max_tokens=2).status_code == 200
    await until("the new ranks' start is traced", has_second_start)


def test_every_line_of_the_log_is_json_and_has_no_prompt(traced: Traced) -> None:
    long = ask(traced, "/v1/completions", "too-long", prompt=f"{SECRET} " * 2000)
    assert long.status_code == 400
    wait_until("the request's line is written", lambda: bool(traced.of_request("too-long")))
    lines = traced.replica_lines()
    assert len(lines) > 5
    for line in lines:
        assert RFC_3339.fullmatch(line["time"]) and line["level"] and line["logger"] and line["message"], line
    requests = [line for line in lines if line["message"] == "request"]
    assert {line["request_id"] for line in requests} >= {"chat", "two", "refused", "left", "survivor", "too-long"}
    assert all("prompts" not in line for line in requests)
    ranks = [json.loads(line) for line in traced.rank_lines()]
    assert {line["rank"] for line in ranks} == {0, 1} and {0, 1} <= {line["epoch"] for line in ranks}
    assert any("recovering" in line["message"] for line in lines), "a rank was killed"
    assert "recover" in traced.server.terminal.read_text(), "the terminal's selection of lines understands JSON"
    assert traced.with_text(SECRET) == []
    assert SECRET not in traced.server.output()
    assert not any(SECRET.encode() in body for body in traced.collector.bodies)
