"""Every sampling field of a body reaches the engine as a field of SamplingParams."""

from typing import Any

import pytest

from deployments.http.limits import HttpLimits
from deployments.http.plan import plan_completion
from deployments.http.prompt_encoder import PromptEncoder
from deployments.http.schemas import CompletionBody
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.spellings import spellings
from tests.support.scripted_engine import FakeEngine


async def params(**fields: Any) -> SamplingParams:
    engine = FakeEngine()
    given = {name: value for name, value in fields.items() if value is not None}  # as `BodyReader` does
    body = CompletionBody.model_validate({"prompt": "x", "max_tokens": 9} | given)
    return (await plan_completion(body, engine, PromptEncoder(engine, HttpLimits().text))).request.params[0]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("presence_penalty", 0.5, 0.5),
        ("frequency_penalty", -1, -1.0),
        ("repetition_penalty", 1.3, 1.3),
        ("min_p", 0.1, 0.1),
        ("min_tokens", 4, 4),
        ("logit_bias", {"5": 2, "9": -100}, ((5, 2.0), (9, -100.0))),
        ("stop_token_ids", [3, 4], (3, 4)),
        ("include_stop_str_in_output", True, True),
        ("allowed_token_ids", [7], (7,)),
    ],
)
async def test_a_field_becomes_its_parameter(field: str, value: object, expected: object) -> None:
    assert getattr(await params(**{field: value}), field) == expected
    assert getattr(await params(**{field: None}), field) == getattr(SamplingParams(), field)


async def test_a_bad_word_is_banned_in_every_spelling() -> None:
    tokenizer = FakeEngine().tokenizer
    found = (await params(bad_words=["red"])).bad_words
    assert found == spellings(["red"], tokenizer)
    for text in ("red", "is red", "\nred"):
        ids = tokenizer.encode(text, bos=False, eos=False)
        assert any(tuple(ids[i : i + len(word)]) == word for word in found for i in range(len(ids))), text
