"""The short form of the fuzz command's HTTP part: the application in this process, over an engine without a model."""

from random import Random
from typing import Any

import httpx
import pytest

from deployments.openai import errors as http_errors
from deployments.openai import validation
from llama_core.errors import LlamaError
from tests.fuzz.http import fuzz_in_process, judge
from tests.fuzz.messages import COMPLETIONS, MARK, Message

ASKED = Message("test", "POST", COMPLETIONS, b"{}")


@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.full)])
async def test_generated_requests_get_valid_answers(count: int) -> None:
    outcome = await fuzz_in_process(count, seed=Random().randrange(10**6))
    assert outcome.findings == []
    assert (
        outcome.cases >= 0.95 * count and outcome.counts["200"] and outcome.counts["400"] and not outcome.counts["500"]
    )


def _error(**changes: Any) -> dict[str, Any]:
    return {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "x"} | changes}


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (400, _error(), None),
        (500, _error(), "status 500"),
        (422, {"detail": []}, "is not documented"),
        (400, {"detail": "no"}, "without an error object"),
        (400, _error(message=""), "another shape"),
        (400, _error(message=f"{MARK} is wrong"), "in an error"),
        (400, _error(message="x" * 5000), "an error of"),
        (200, {"choices": []}, "without choices"),
        (200, {"choices": [{}]}, None),
    ],
)
def test_an_answer_is_checked_for_status_shape_and_repeated_input(
    status: int, body: dict[str, Any], fault: str | None
) -> None:
    found = judge(ASKED, httpx.Response(status, json=body))
    assert found is None if fault is None else fault in (found or "")


async def test_an_exception_in_the_server_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_explain", lambda details: http_errors.INTERNAL)
    outcome = await fuzz_in_process(300, seed=1)
    assert any("status 500" in finding for finding in outcome.findings)


async def test_an_error_that_repeats_its_input_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaError, "message", property(lambda error: f"{error.args[0]} {MARK}"))
    outcome = await fuzz_in_process(300, seed=1)
    assert any(MARK in finding for finding in outcome.findings)
