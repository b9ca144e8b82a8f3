"""Accepted and refused bodies, and the messages of refusals."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from deployments.http.limits import HttpLimits
from deployments.http.messages_api.schemas import MessagesBody
from deployments.http.request_body import parse_json
from deployments.http.responses_api.schemas import ResponsesBody
from deployments.http.routes import DetokenizeBody
from deployments.openai.errors import InvalidJson
from deployments.openai.plan import plan_completion
from deployments.openai.prompt_encoder import PromptEncoder
from deployments.openai.schemas import ChatBody, CompletionBody
from deployments.openai.score import ClassifyBody, ScoreBody
from deployments.openai.validation import validate
from llama_core.errors import InvalidParameter, InvalidRequest
from llama_core.scheduling.sampling_params import SLOT_FIELDS, SamplingParams
from llama_core.text.tokenizers.tokenizer import spellings
from tests.support.scripted_engine import FakeEngine
from tests.support.waiting import processor_s

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionBody:
    return validate(CompletionBody, {"prompt": "x"} | fields)


def object_with(num_keys: int) -> bytes:
    return b"{" + b",".join(b'"k%d":1' % i for i in range(num_keys)) + b"}"


def test_a_body_has_at_most_a_thousand_fields() -> None:
    assert len(parse_json(object_with(1000))) == 1000
    with pytest.raises(InvalidJson, match="1000 fields"):
        parse_json(object_with(1001))


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (CompletionBody, {"messages": [USER]}, "prompt: is required; messages go to /v1/chat/completions"),
        (ChatBody, {"prompt": "x"}, "messages: is required; a prompt goes to /v1/completions"),
        (ChatBody, {"input": "x"}, "messages: is required; input goes to /v1/responses"),
        (ResponsesBody, {"messages": [USER]}, "input: is required; messages go to /v1/chat/completions"),
        (MessagesBody, {"prompt": "x", "max_tokens": 5}, "messages: is required; a prompt goes to /v1/completions"),
        (ChatBody, {}, "messages: is required"),
        (ClassifyBody, {"messages": [USER]}, "labels: is required"),
        (ChatBody, {"messages": [USER], "response_format": "json_object"}, "response_format: must be an object"),
        (ResponsesBody, {"input": "x", "tool_choice": 5}, "tool_choice: must be a string or an object"),
        (ResponsesBody, {"input": "x", "metadata": {"str": 5}}, "metadata: must be an object of at most 16 strings"),
    ],
)
def test_a_refusal_says_what_is_needed_instead(kind: type[BaseModel], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(kind, fields)
    assert (refused.value.message, refused.value.param) == (message, message.partition(":")[0])


BODIES: dict[type[BaseModel], dict[str, Any]] = {
    CompletionBody: {"prompt": "x", "echo": True},
    ChatBody: {"messages": [USER], "logprobs": True},
    MessagesBody: {"messages": [USER], "max_tokens": 5},
    ResponsesBody: {"input": "x"},
    ScoreBody: {"prompt": "x", "continuations": ["y"]},
    ClassifyBody: {"prompt": "x", "labels": ["y", "z"]},
    DetokenizeBody: {"tokens": [5]},
}


@pytest.mark.parametrize("kind", BODIES)
def test_null_means_absent_in_every_field(kind: type[BaseModel]) -> None:
    """Also in fields that are refused unless their value is neutral."""
    given, known = BODIES[kind], {*kind.model_fields, *getattr(kind, "neutral", ())}
    nulls = dict.fromkeys(known - given.keys())
    assert validate(kind, given | nulls).model_dump() == validate(kind, given).model_dump()


INTEGERS = [
    (body, name)
    for body in BODIES
    for name, schema in body.model_json_schema()["properties"].items()
    if "integer" in [each.get("type") for each in schema.get("anyOf", [schema])]
]


def test_every_body_has_integers() -> None:
    assert {body for body, _ in INTEGERS} == BODIES.keys() - {DetokenizeBody}
    assert len(INTEGERS) > 25


@pytest.mark.parametrize(("body", "name"), INTEGERS)
def test_a_number_without_a_fraction_is_an_integer(body: type[BaseModel], name: str) -> None:
    """As in JSON Schema: clients whose numbers are all floats, such as Lua's, send 2.0."""
    whole, fields = validate(body, BODIES[body] | {name: 2}), BODIES[body] | {name: 2.0}
    for raw in (json.dumps(fields), json.dumps(fields).replace("2.0", "20e-1")):
        sent = validate(body, parse_json(raw.encode()))
        assert sent == whole and type(getattr(sent, name)) is int
    too_large = () if name in SLOT_FIELDS else ("1e300",)  # where the body has a range
    for text in ("2.5", "1e400", "-1e400", "true", '"2"', "[2.0]", *too_large):
        with pytest.raises(InvalidParameter) as refused:
            validate(body, parse_json(json.dumps(fields).replace("2.0", text).encode()))
        assert refused.value.param == name


def test_token_ids_may_be_numbers_without_a_fraction() -> None:
    for prompt in ([1, 2.0], [[1.0], [2, 3.0]]):
        sent = completion(prompt=prompt, stop_token_ids=[7.0, 8], allowed_token_ids=[9.0])
        assert sent.prompt == completion(prompt=[list(map(int, each)) for each in sent.prompt]).prompt
        assert {type(token) for each in sent.prompt for token in each} == {int}
        assert (sent.stop_token_ids, sent.allowed_token_ids) == ([7, 8], [9])
    assert validate(DetokenizeBody, {"tokens": [5.0, 6]}).tokens == [5, 6]
    for wrong in ([1.5], [True], ["1"], [1.0, True], [float("inf")]):
        with pytest.raises(InvalidParameter, match=r"^stop_token_ids\[\d\]: must be an integer"):
            completion(stop_token_ids=wrong)


def test_a_prompt_of_any_of_the_four_kinds_becomes_a_list_of_prompts() -> None:
    assert completion(prompt="a").prompt == ["a"]
    assert completion(prompt=["a", "b"]).prompt == ["a", "b"]
    assert completion(prompt=[1, 2]).prompt == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompt == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("kind", "name", "many"),
    [(CompletionBody, "prompt", many) for many in (["a"] * 100_000, [[1]] * 100_000, ["a", 1] * 50_000, [None] * 100_000)]
    + [(ChatBody, "messages", [{}] * 100_000)],
    ids=["texts", "lists", "both", "nulls", "messages"],
)  # fmt: skip
def test_a_hundred_thousand_bad_items_are_refused_at_once(kind: type[BaseModel], name: str, many: list[object]) -> None:
    def refused() -> None:
        with pytest.raises(InvalidRequest):
            validate(kind, {name: many})

    assert processor_s(refused) < 5 * processor_s(lambda: json.dumps(many))


async def params(**fields: Any) -> SamplingParams:
    engine = FakeEngine()
    given = {name: value for name, value in fields.items() if value is not None}  # as `BodyReader` does
    body = CompletionBody.model_validate({"prompt": "x", "max_tokens": 9} | given)
    return (await plan_completion(body, engine, PromptEncoder(HttpLimits().text).of("", engine))).request.params[0]


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
