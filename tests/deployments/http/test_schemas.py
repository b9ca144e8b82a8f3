"""Accepted and refused bodies, and the messages of refusals."""

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

from deployments.http.errors import InvalidJson, Unsupported
from deployments.http.limits import HttpLimits
from deployments.http.messages_api.schemas import MessagesBody
from deployments.http.plan import plan_completion
from deployments.http.prompt_encoder import PromptEncoder
from deployments.http.request_body import parse_json
from deployments.http.responses_api.schemas import ResponsesBody
from deployments.http.schemas import ChatBody, CompletionBody
from deployments.http.score import ClassifyBody, ScoreBody
from deployments.http.tokenizer_schemas import DetokenizeBody
from deployments.http.unsupported import CHAT_NEUTRAL, NEUTRAL, refuse_unsupported
from deployments.http.validation import validate
from llama_core.errors import InvalidDialog, InvalidParameter, InvalidRequest
from llama_core.scheduling.sampling_params import SLOT_FIELDS
from tests.support.processor_time import processor_s
from tests.support.scripted_engine import FakeEngine

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionBody:
    return validate(CompletionBody, {"prompt": "x"} | fields)


def planned(**fields: Any) -> None:
    """Checks the fields as a request's are: `SamplingParams` knows the ranges."""
    engine = FakeEngine()
    asyncio.run(plan_completion(completion(**fields), engine, PromptEncoder(engine, HttpLimits().text)))


def chat(**fields: Any) -> ChatBody:
    return validate(ChatBody, {"messages": [USER]} | fields)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"nonsense", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": "\xff"}', b'{"a": "\\ud800"}',
        b'{"a": "\x00"}', b'{"a":' + b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"\xef\xbb\xbf\xef\xbb\xbf{}", b"{} {}",
        b"[]", b"3", b"null",
    ],
)  # fmt: skip
def test_a_body_that_is_not_a_json_object_is_invalid_json(raw: bytes) -> None:
    with pytest.raises(InvalidJson) as caught:
        parse_json(raw)
    assert len(caught.value.message) < 150


def test_a_list_that_must_not_be_empty_needs_one_item() -> None:
    with pytest.raises(InvalidDialog, match=r"^messages: must have at least 1 item$"):
        validate(ChatBody, {"messages": []})


def test_an_empty_body_is_called_empty() -> None:
    with pytest.raises(InvalidJson, match=r"^The body is empty"):
        parse_json(b"")


def test_millions_of_empty_lists_are_refused_before_they_are_parsed() -> None:
    text = b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}"

    def refused() -> None:
        with pytest.raises(InvalidJson):
            parse_json(text)

    assert processor_s(refused) < processor_s(lambda: json.loads(text)) / 2


def object_with(num_keys: int) -> bytes:
    return b"{" + b",".join(b'"k%d":1' % i for i in range(num_keys)) + b"}"


def test_a_million_keys_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.http.request_body.from_json", lambda *_, **__: pytest.fail("was parsed"))
    for raw in (object_with(1_000_000), b'{"prompt": "x", "metadata": ' + object_with(500_000) + b"}"):
        with pytest.raises(InvalidJson, match="more than this server reads"):
            parse_json(raw)


def test_a_million_strings_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.http.request_body.from_json", lambda *_, **__: pytest.fail("was parsed"))
    for text in (b"%d", b"%d\\\\", b'\\"%d', b"[]%d"):
        strings = b",".join(b'"%s"' % (text % i) for i in range(900_000))
        with pytest.raises(InvalidJson, match="300000 strings"):
            parse_json(b'{"prompt": "x", "metadata": [' + strings + b"]}")


def test_megabytes_of_long_integers_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.http.request_body.from_json", lambda *_, **__: pytest.fail("was parsed"))
    with pytest.raises(InvalidJson, match="long integers"):
        parse_json(b'{"prompt": "x", "metadata": [' + b",".join([b"9" * 4299] * 3800) + b"]}")


@pytest.mark.parametrize("text", ["1234567890", "[1,2],[,,]", "{:}", '\\"', '"', "\\\\", '[\\\\"],'])
def test_the_contents_of_a_string_do_not_count_as_structure(text: str) -> None:
    body = {"prompt": text * 300_000, "stop": ["\\", '"']}
    assert parse_json(json.dumps(body).encode()) == body


def test_a_body_has_at_most_a_thousand_fields() -> None:
    assert len(parse_json(object_with(1000))) == 1000
    with pytest.raises(InvalidJson, match="1000 fields"):
        parse_json(object_with(1001))


def any_of(*values: Any) -> tuple[Any, ...]:
    """The values, of any types."""
    return values


def test_null_means_absent_in_every_field() -> None:
    absent = completion(**{name: None for name in CompletionBody.model_fields if name != "prompt"})
    assert absent == completion()


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), "1", True, [], 10**400, -1e9, 1e9])
def test_numbers_must_be_finite_numbers_in_their_range(field: str, value: object) -> None:
    with pytest.raises(InvalidParameter) as caught:
        planned(**{field: value})
    assert caught.value.param == field
    assert caught.value.message.startswith(f"{field}: must be")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (0, -2, True, "5", 1.5, 10**30)],
        *[("n", value) for value in (0, 10**9, 1.5)],
        *[("seed", value) for value in (2**63, -(2**63) - 1, "1")],
        *[("logprobs", value) for value in (-1, 21, 1000, True)],
        *[("top_k", value) for value in (-2, 2**31, 0.5)],
        *[("temperature", value) for value in (-1, 2.01)],
        *[("top_p", value) for value in (-0.1, -1, 1.01)],
        *[("min_p", value) for value in (-0.1, 1.1)],
        *[("presence_penalty", value) for value in (-2.1, 2.1)],
        *[("repetition_penalty", value) for value in (0, -1)],
        *(("stop", value) for value in any_of("", [""], ["a"] * 17, "x" * 257, ["x" * 2**20], 3, [3], {})),
        *(("prompt", value) for value in any_of([], [[]], [1, "a"], [[1], []], [[1.5]], [True], 3, {}, ["a"] * 129)),
        *(("prompt", value) for value in any_of([1.5], [1.0, True], [1.0, "a"])),
        *(("logit_bias", value) for value in any_of([], {"a": 1}, {"1": 101}, {"1": True}, {"1" * 30: 1}, {"1": 1, "01": 2})),
        ("stream", 1), ("echo", "yes"), ("model", 3), ("user", 3), ("stream_options", []), ("best_of", 0),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_field_and_never_itself(field: str, value: object) -> None:
    with pytest.raises(InvalidParameter) as caught:
        planned(**{field: value})
    assert caught.value.param == field
    assert len(caught.value.message) < 200


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
        (ResponsesBody, {"input": "x", "metadata": {"str": 5, "bool": 5}}, "metadata.str: must be a string"),
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


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 2**31 - 1), ("seed", 2**63 - 1), ("seed", -(2**63)), ("temperature", 0), ("temperature", 2),
     ("top_p", 1), ("top_k", -1), ("n", 128), ("logprobs", 0), ("logprobs", 20), ("stop", ["x" * 256] * 16)],
)  # fmt: skip
def test_the_legal_extremes_are_accepted(field: str, value: object) -> None:
    completion(**{field: value})


def test_a_prompt_of_any_of_the_four_kinds_becomes_a_list_of_prompts() -> None:
    assert completion(prompt="a").prompt == ["a"]
    assert completion(prompt=["a", "b"]).prompt == ["a", "b"]
    assert completion(prompt=[1, 2]).prompt == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompt == [[1], [2, 3]]


@pytest.mark.parametrize("prompt", [["a"] * 100_000, [[1]] * 100_000, ["a", 1] * 50_000, [None] * 100_000])
def test_a_hundred_thousand_prompts_are_refused_at_once(prompt: list[object]) -> None:
    def refused() -> None:
        with pytest.raises(InvalidParameter):
            completion(prompt=prompt)

    assert processor_s(refused) < 5 * processor_s(lambda: json.dumps(prompt))


def test_content_is_a_string_or_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a\nb"


@pytest.mark.parametrize(
    "message",
    [{"role": "user"}, {"role": "user", "content": None}, {"role": "wizard", "content": "x"}, {"content": "x"}, "text",
     {"role": "tool", "content": "x"}, {"role": "user", "content": 3}, {"role": "user", "content": [{"type": "text"}]},
     {"role": "user", "content": ["x"]}],
)  # fmt: skip
def test_a_bad_message_is_named_by_its_index(message: object) -> None:
    with pytest.raises((InvalidDialog, InvalidParameter)) as caught:
        chat(messages=[USER, message])
    assert "messages[1]" in caught.value.message
    assert (caught.value.param or "").startswith("messages[1]")


def test_a_hundred_thousand_bad_messages_are_refused_at_once() -> None:
    messages: list[dict[str, str]] = [{}] * 100_000

    def refused() -> None:
        with pytest.raises(InvalidRequest):
            chat(messages=messages)

    assert processor_s(refused) < 5 * processor_s(lambda: json.dumps(messages))


def test_image_parts_are_unsupported_by_name() -> None:
    with pytest.raises(Unsupported) as caught:
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "x"),
     ("use_beam_search", True), ("audio", {"voice": "x"}), ("modalities", ["text", "audio"])],
)  # fmt: skip
def test_a_known_field_that_would_change_the_answer_is_unsupported(field: str, value: object) -> None:
    for neutral in (NEUTRAL, CHAT_NEUTRAL):
        with pytest.raises(Unsupported) as caught:
            refuse_unsupported({field: value}, neutral)
        assert caught.value.param == field


@pytest.mark.parametrize(
    "fields",
    [{"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"logit_bias": {}},
     {"presence_penalty": 0}, {"repetition_penalty": 1.0}, {"min_p": 0.0}, {"min_tokens": 0}, {"modalities": ["text"]},
     {"suffix": ""}, {"use_beam_search": False}, {"what_nobody_knows": [1, 2]}, {"metadata": {"a": "b"}}],
)  # fmt: skip
def test_neutral_values_and_unknown_fields_pass(fields: dict[str, object]) -> None:
    refuse_unsupported(fields, NEUTRAL)
    completion(**fields)
