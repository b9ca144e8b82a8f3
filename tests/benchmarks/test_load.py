"""The load client, and the questions beside and overload: reading received bytes, requests to a real server, refusals."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.harness.load import Answer, HttpSession, Load, drive, read_answer
from benchmarks.harness.workload import uniform_batch
from benchmarks.questions import beside as bench_beside
from benchmarks.questions import overload as bench_overload
from llama_core.errors import NonFiniteLogits
from tests.support.scripted_engine import MODEL_ID, FakeEngine, serve

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"text": text, "finish_reason": reason}])


def read(pieces: Sequence[tuple[float, bytes]]) -> Answer:
    return read_answer(0.0, 9.0, pieces)


def test_a_tokens_time_is_when_its_event_was_complete() -> None:
    first, second = chunk(token("a")), chunk(token("b"))
    answer = read(
        [
            (1.0, HEAD),
            (2.0, first + second[:20]),
            (3.0, second[20:]),
            (4.0, chunk(token("c") + token("", "length")) + chunk(event(choices=[], usage={"completion_tokens": 3}))),
            (5.0, chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"),
        ]
    )
    assert answer == Answer(0.0, 9.0, [2.0, 3.0, 4.0], 3)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nnot now", "HTTP 503 Service Unavailable: not now"),
        (HEAD + chunk(token("a")) + chunk(event(error={"message": "bad"})), "bad"),
        (HEAD + chunk(token("a")), "without [DONE]"),
        (HEAD + chunk(token("a"))[:-5], "without [DONE]"),
        (b"", "HTTP"),
    ],
)
def test_an_incomplete_or_failed_stream_is_an_error(raw: bytes, error: str) -> None:
    assert error in (read([(1.0, raw)]).error or "")


def test_figures_are_of_successful_requests_and_count_the_failed() -> None:
    good = Answer(10.0, 12.0, [10.5, 11.0, 12.0], 3)
    figures = Load([good, Answer(10.0, 10.1, error="no")], seconds=2.0, client_cpu_s=0.5).figures()
    assert (figures["requests"], figures["failed"], figures["errors"]) == (1, 1, ["no"])
    assert figures["output_tok_s"] == 1.5
    assert figures["ttft_p50_ms"] == 500
    assert figures["between_p50_ms"] == 750
    assert figures["decode_tok_s"] == pytest.approx(2 / 1.5)
    assert figures["client_cpu_cores"] == 0.25
    with pytest.raises(ValueError, match="every request failed: no"):
        Load([Answer(0, 1, error="no")], 1.0, 0.0).figures()


@pytest.mark.parametrize("new_connections", [False, True])
async def test_every_token_arrives_over_kept_and_over_new_connections(new_connections: bool) -> None:
    with serve(FakeEngine("One two three four five.")) as served:
        sessions = [HttpSession(served.url, MODEL_ID, new_connections=new_connections) for _ in range(2)]
        load = await drive(sessions, uniform_batch(6, 8, 20, 200))
        for session in sessions:
            await session.close()
        assert [stream.params.max_tokens for stream in served.engine.streams] == [20] * 6
        assert all(stream.params.ignore_eos for stream in served.engine.streams)
    figures = load.figures()
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (6, 0, 120)
    assert all(answer.began_s < answer.token_times[0] <= answer.ended_s for answer in load.answers)


async def test_refusals_failures_and_a_missing_server_are_counted() -> None:
    with serve(FakeEngine()) as served:
        served.engine.fail_at = (3, NonFiniteLogits("this one fails"))
        session = HttpSession(served.url, MODEL_ID)
        load = await drive([session], uniform_batch(2, 8, 10, 200))
        assert ["this one fails" in (answer.error or "") for answer in load.answers] == [True, True]
        load = await drive([HttpSession(served.url, "another-model")], uniform_batch(1, 8, 10, 200))
        assert (load.answers[0].error or "").startswith("HTTP 404")
        await session.close()
    load = await drive([HttpSession(served.url, MODEL_ID)], uniform_batch(1, 8, 10, 200))
    assert (load.answers[0].error or "").startswith("HTTP 000")


# The question `beside`: a short request beside a long prompt, on any server.


def test_the_command_compares_both_requests_with_themselves_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(FakeEngine("One two three four five.", step_s=0.05)) as served:
        sizes = ["--prompt", "8", "--long-prompt", "40", "--output", "3", "--vocab-size", "200", "--rounds", "2"]
        bench_beside.main(["--url", served.url, "--model", MODEL_ID, *sizes])
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    times = result["times_ms"]
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys(times, 2)
    assert result["long_ratio"] == pytest.approx(result["long_beside_p50_ms"] / result["long_alone_p50_ms"], rel=1e-3)


# The question `overload`: a server that refuses loses no request.


def test_the_command_loses_nothing_on_a_server_that_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine("One two three four five.", step_s=0.01)
    engine.max_streams = 4
    with serve(engine) as served:
        # A pause of the machine in too short a peak leaves no goodput, or one so low that four times as much is no overload.
        load = ["--clients", "2", "4", "--peak-seconds", "2", "--seconds", "1", "--factor", "4"]
        sizes = ["--prompt", "8", "--output", "10", "--vocab-size", "200"]
        bench_overload.main(["--url", served.url, "--model", MODEL_ID, *load, *sizes])
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    over = result["overload"]
    assert over["lost"] == 0 and over["whole"] > 0 and over["refused"] > 0
    assert over["requests"] == over["whole"] + over["refused"]
    peaks = (result["peak"]["goodput_tok_s"], result["peak_again"]["goodput_tok_s"])
    assert result["goodput_of_peak"] == pytest.approx(over["goodput_tok_s"] / (sum(peaks) / 2), rel=1e-4)
    assert result["peak_clients"] in (2, 4)
