"""Bad input over real HTTP: each request gets its documented error, and a canary request succeeds after it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support import http
from tests.support.http import samples
from tests.support.scripted_engine import MAX_SEQ_LEN, MODEL_ID, FakeEngine, Served, assert_error, canary, serve, sse

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCORE = "/v1/score"
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "hi"}
BOTH: list[tuple[str, dict[str, Any]]] = [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [USER]})]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(FakeEngine()) as running:
        yield running


@pytest.fixture(autouse=True)
def _canary(served: Served) -> Iterator[None]:
    yield
    canary(served)


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return http.post(served.url + path, content=json.dumps(body), headers=JSON)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"max_tokens": ' + b"9" * 5000 + b"}", b'"text"',
     b'{"prompt": "\\ud800"}', b'{"prompt": "\x01"}', b'{"temperature": NaN}', b'{"x": -Infinity}'],
    ids=["empty", "cut", "utf8", "deep", "digits", "text", "surrogate", "control", "nan", "infinity"],
)  # fmt: skip
def test_a_body_that_is_not_json_is_400(served: Served, path: str, raw: bytes) -> None:
    assert_error(http.post(served.url + path, content=raw, headers=JSON), 400, "invalid_json")


@pytest.mark.parametrize(
    ("kind", "status"),
    [*((kind, 415) for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "")),
     *((kind, 200) for kind in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/problem+json"))],
)  # fmt: skip
def test_only_json_content_types_are_taken(served: Served, kind: str, status: int) -> None:
    answer = http.post(served.url + COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind})
    assert answer.status_code == status
    if status != 200:
        assert_error(answer, 415, "unsupported_media_type")


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_float_that_is_not_finite_is_400(
    served: Served, path: str, body: dict[str, Any], field: str, number: str
) -> None:
    raw = json.dumps(body)[:-1] + f', "{field}": {number}}}'
    answer = http.post(served.url + path, content=raw, headers=JSON)
    assert_error(answer, 400, "invalid_json" if "N" in number or "I" in number else "invalid_parameter")


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", 2.5), ("top_p", -0.1), ("top_p", -1), ("top_p", 1.01), ("min_p", 2),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("max_tokens", 0),
        ("max_tokens", -2), ("max_tokens", True), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", 10**30),
        ("n", 0), ("n", 10**9), ("seed", 2**63), ("seed", -(2**63) - 1), ("logprobs", -1), ("logprobs", 1000),
        ("stop", ""), ("stop", ["a"] * 17), ("stop", "x" * 2**20), ("stop", 3), ("stop", [None]), ("top_k", -2),
        ("stream_options", {"include_usage": True}), ("min_tokens", -1), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"640": 1}), ("logit_bias", {str(2**31): 1}), ("logit_bias", {"x": 1}), ("bad_words", [""]),
        ("bad_words", "x"), ("bad_words", ["x"] * 99), ("stop_token_ids", [640]),
        ("stop_token_ids", [1] * 999), ("allowed_token_ids", [-1]), ("allowed_token_ids", 5),
    ],
)  # fmt: skip
def test_a_parameter_out_of_range_is_400(
    served: Served, path: str, body: dict[str, Any], field: str, value: object
) -> None:
    error = assert_error(post(served, path, body | {field: value}), 400, "invalid_parameter")
    assert error["param"] == field
    assert field in (error["message"] or "")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"best_of": 1, "n": 2}),
        (COMPLETIONS, {"prompt": ["x"] * 65, "n": 2}),
        (COMPLETIONS, {"prompt": [[0, 640]]}),
        (COMPLETIONS, {"prompt": "", "add_special_tokens": False}),
        (COMPLETIONS, {"max_tokens": 5, "min_tokens": 6}),
        (COMPLETIONS, {"max_tokens": 0, "echo": True, "min_tokens": 2}),
        (COMPLETIONS, {"prompt": [[5], [5] * 200], "max_tokens": -1, "min_tokens": 60}),
        (CHAT, {"min_tokens": MAX_SEQ_LEN}),
        (CHAT, {"top_logprobs": 3}),
    ],
)
def test_fields_that_contradict_each_other_or_the_vocabulary_are_400(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    assert_error(post(served, path, {"prompt": "x", "messages": [USER]} | fields), 400, "invalid_parameter")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "The", "continuations": [[640]]},
        {"prompt": [1, 2], "continuations": [""]},
        {"prompt": [1, 2], "continuations": [[5] * (MAX_SEQ_LEN + 1)]},
        {"prompt": "The", "continuations": ["x"] * 129},
    ],
)
def test_a_bad_continuation_is_named(served: Served, body: dict[str, Any]) -> None:
    error = post(served, SCORE, body).json()["error"]
    assert error["param"] == "continuations"
    assert error["message"].startswith("continuations: ") and "prompts" not in error["message"]


def tagged(tag: str) -> list[dict[str, Any]]:
    return [USER | {"content": f"a {tag} b"}]


SYSTEM, ASSISTANT = {"role": "system", "content": "x"}, {"role": "assistant", "content": "x"}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("messages", "code", "place"),
    [
        ([], "invalid_dialog", ""),
        ([{"role": "user"}], "invalid_dialog", "messages[0]"),
        ([{"role": "wizard", "content": "x"}], "invalid_dialog", "messages[0]"),
        ([ASSISTANT], "invalid_dialog", "messages[0]"),
        ([USER, USER, SYSTEM], "invalid_dialog", "messages[2]"),
        ([USER, ASSISTANT], "invalid_dialog", "messages[1]"),
        ([SYSTEM], "invalid_dialog", "messages[0]"),
        ([USER, ASSISTANT | {"tool_calls": [{"id": "1"}]}, USER], "invalid_dialog", "messages[1].tool_calls[0]"),
        ([USER | {"content": IMAGE}], "unsupported", "messages[0].content[0].type"),
        *((tagged(tag), "special_tags", "messages[0]") for tag in ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")),
    ],
)
def test_a_dialog_that_cannot_be_written_is_400_and_names_the_place(
    served: Served, messages: list[dict[str, Any]], code: str, place: str
) -> None:
    error = assert_error(post(served, CHAT, {"messages": messages}), 400, code)
    assert place in (error["message"] or "")
    assert "tool_calls" not in place or error["param"] == place
    if code == "special_tags":
        assert samples(served.metrics.render())["invalid_dialog_assertions_count"] > 0


@pytest.mark.parametrize("text", ["</s>", "<s>", "\x00\x1b[2J", "\u202eright to left", "\ufeffbom", "a\r\nb"])
def test_control_characters_and_names_of_control_tokens_are_plain_text(served: Served, text: str) -> None:
    assert post(served, CHAT, {"messages": [USER | {"content": text}]}).status_code == 200
    prompt = served.engine.streams[-1].prompt
    assert [token for token in prompt if token == served.engine.tokenizer.bos_id] == prompt[:1]
    assert served.engine.tokenizer.eos_id not in prompt


def test_an_unknown_model_is_404_and_names_the_valid_one(served: Served) -> None:
    for path, body in BOTH:
        error = assert_error(post(served, path, body | {"model": "gpt-9"}), 404, "model_not_found")
        assert MODEL_ID in (error["message"] or "")
        assert post(served, path, body | {"model": MODEL_ID}).status_code == 200
    assert_error(http.get(served.url + "/v1/models/some/other"), 404, "model_not_found")


def test_a_wrong_route_is_404_and_a_wrong_method_405(served: Served) -> None:
    assert_error(http.get(served.url + "/v2/nothing"), 404, "not_found")
    answer = http.get(served.url + CHAT)
    assert_error(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    # A path of two routes.
    assert http.request("DELETE", served.url + "/ping").headers["allow"] == "GET, HEAD, POST"


def test_unknown_fields_nulls_and_neutral_values_are_accepted(served: Served) -> None:
    fields: dict[str, Any] = {
        "repetition_penalty": 1.0, "logprobs": None, "stop": None, "ignore_eos": None, "presence_penalty": 0,
        "who_knows": {"a": [1]}, "metadata": {"a": "b"}, "tools": [], "top_k": -1, "user": "u", "store": False,
        "parallel_tool_calls": True,
    }  # fmt: skip
    for path, body in BOTH:
        answer = post(served, path, body | fields)
        assert (answer.status_code, "service_tier" in answer.json()) == (200, False)
        assert answer.json()["system_fingerprint"].startswith("fp_")
        assert post(served, path, body | {"service_tier": "auto"}).json()["service_tier"] == "default"
        chunks = sse(post(served, path, body | {"service_tier": "auto", "stream": True}).text)
        assert {chunk["service_tier"] for chunk in chunks} == {"default"}
