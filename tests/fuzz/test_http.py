"""The short form of the fuzz command's HTTP part: the application in this process, over an engine without a model."""

from random import Random

import pytest

from deployments.openai import errors as http_errors
from deployments.openai import validation
from llama_core.errors import LlamaError
from tests.fuzz.http import fuzz
from tests.fuzz.messages import MARK


@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.full)])
async def test_generated_requests_get_valid_answers(count: int) -> None:
    outcome = await fuzz(count, seed=Random().randrange(10**6))
    assert outcome.findings == []
    assert outcome.cases >= 0.95 * count and outcome.counts["200"] and outcome.counts["400"]


async def test_an_exception_in_the_server_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_explain", lambda details: http_errors.INTERNAL)
    outcome = await fuzz(300, seed=1)
    assert any("status 500" in finding for finding in outcome.findings)


async def test_an_error_that_repeats_its_input_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaError, "message", property(lambda error: f"{error.args[0]} {MARK}"))
    outcome = await fuzz(300, seed=1)
    assert any(MARK in finding for finding in outcome.findings)
