"""The routes as the official openai package and operators use them."""

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import datetime
from typing import Any

import httpx
import openai
import pytest

from deployments.engine.interface import Readiness
from deployments.engine.metrics import Metrics
from deployments.http.app import HttpLimits, build_http_app
from deployments.http.prompt_encoder import TextLimits
from llama_core.errors import CheckpointChanged, NonFiniteLogits, RankFailure
from llama_core.scheduling.request import TokenLogprob
from llama_core.scheduling.sampling_params import SamplingParams, mix_seed
from tests.support import http
from tests.support.scripted_engine import (
    MAX_SEQ_LEN,
    MODEL_ID,
    FakeEngine,
    Served,
    assert_error,
    canary,
    eventually,
    serve,
    sse,
)

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(FakeEngine("Hello there, 🙂 how are you?")) as running:
        yield running
        if running.engine.state.ready and running.engine.fail_at is None:
            canary(running)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="whatever", max_retries=0) as made:
        yield made


def test_the_openai_package_chats(served: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL_ID, messages=[{"role": "user", "content": "hi"}])
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", served.engine.answer)
    assert choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL_ID
    assert answer.system_fingerprint
    stream = served.engine.streams[-1]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(stream.prompt)
    assert answer.usage.completion_tokens == len(stream.answer)
    assert answer.usage.total_tokens == len(stream.prompt) + len(stream.answer)
    details = answer.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens == 0


def test_a_streamed_chat_is_the_whole_one_in_pieces(served: Served, client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL_ID,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == served.engine.answer
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts][-1] == "stop"
    assert not last.choices
    assert last.usage is not None
    assert last.usage.completion_tokens == len(served.engine.streams[-1].answer)
    assert len({part.id for part in chunks}) == 1


def test_completions_go_on_where_the_prompt_ends(served: Served, client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL_ID, prompt="Once", max_tokens=200)
    assert whole.choices[0].text == " " + served.engine.answer
    parts = list(client.completions.create(model=MODEL_ID, prompt="Once", max_tokens=200, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    echoed = client.completions.create(model=MODEL_ID, prompt="Once", max_tokens=200, echo=True)
    assert echoed.choices[0].text == "Once " + served.engine.answer
    parts = list(client.completions.create(model=MODEL_ID, prompt="Once", max_tokens=200, echo=True, stream=True))
    assert "".join(part.choices[0].text for part in parts) == echoed.choices[0].text


def test_a_text_prompt_gets_bos_and_an_id_prompt_nothing(served: Served, client: openai.OpenAI) -> None:
    tokenizer = served.engine.tokenizer
    client.completions.create(model=MODEL_ID, prompt="Once")
    assert served.engine.streams[-1].prompt == tokenizer.encode("Once", bos=True, eos=False)
    client.completions.create(model=MODEL_ID, prompt="Once", extra_body={"add_special_tokens": False})
    assert served.engine.streams[-1].prompt == tokenizer.encode("Once", bos=False, eos=False)
    client.completions.create(model=MODEL_ID, prompt=[[7, 8], [9]])
    assert [stream.prompt for stream in served.engine.streams[-2:]] == [[7, 8], [9]]


def test_choices_are_indexed_by_prompt_then_by_number_with_seeds_of_their_own(
    served: Served, client: openai.OpenAI
) -> None:
    answer = client.completions.create(model=MODEL_ID, prompt=["a", "b b b"], n=3, seed=-5, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    streams = served.engine.streams[-6:]
    assert [stream.params.seed for stream in streams] == [mix_seed(-5, i) for i in (0, 1, 2)] * 2
    assert len({tuple(stream.prompt) for stream in streams[:3]}) == 1
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(streams[0].prompt) + len(streams[3].prompt)
    assert answer.usage.completion_tokens == 12
    parts = client.completions.create(model=MODEL_ID, prompt=["a", "b b b"], n=3, max_tokens=2, stream=True)
    assert {part.choices[0].index for part in parts} == set(range(6))


def test_defaults_are_the_references_and_limits_are_openais(served: Served, client: openai.OpenAI) -> None:
    client.completions.create(model=MODEL_ID, prompt="Once")
    params = served.engine.streams[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.9, 0, 16)
    client.chat.completions.create(model=MODEL_ID, messages=[{"role": "user", "content": "hi"}])
    stream = served.engine.streams[-1]
    assert stream.params.max_tokens == MAX_SEQ_LEN - len(stream.prompt)
    client.chat.completions.create(
        model=MODEL_ID, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3, temperature=0, top_p=1
    )
    params = served.engine.streams[-1].params
    assert (params.temperature, params.top_p, params.max_tokens) == (0, 1, 3)


def test_the_developer_role_means_system(served: Served) -> None:
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Be brief."}, USER]
        assert http.post(served.url + "/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert served.engine.streams[-1].prompt == served.engine.streams[-2].prompt


def test_models_are_listed_with_their_context(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL_ID]
    fields = models[0].model_dump()
    assert (fields["root"], fields["parent"], fields["max_model_len"]) == (MODEL_ID, None, MAX_SEQ_LEN)
    assert fields["object"] == "model" and fields["created"] > 1.7e9 and fields["owned_by"]
    assert client.models.retrieve(MODEL_ID).model_dump() == fields


def test_models_have_the_fields_that_anthropics_client_reads(served: Served) -> None:
    page = httpx.get(served.url + "/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, MODEL_ID, MODEL_ID)
    (model,) = page["data"]
    assert (model["type"], model["display_name"], model["lifecycle"]) == ("model", MODEL_ID, "active")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    assert model["max_input_tokens"] == model["max_tokens"] == MAX_SEQ_LEN
    assert httpx.get(f"{served.url}/v1/models/{MODEL_ID}").json() == model


def test_the_openai_package_raises_its_own_classes(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL_ID, prompt="x", temperature=9)
    assert bad.value.param == "temperature"
    served.engine.max_streams = 0
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(model=MODEL_ID, prompt="x")
    assert full.value.response.headers["retry-after"] == "2"
    served.engine.max_streams = 100


def test_a_request_refused_by_a_full_queue_is_not_tokenized_and_keeps_its_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.engine.max_streams = 0
    with httpx.Client() as client, monkeypatch.context() as patched:
        patched.setattr(type(served.engine.tokenizer), "encode", lambda *_, **__: pytest.fail("was tokenized"))
        for _ in range(2):
            answer = client.post(served.url + "/v1/completions", json={"model": MODEL_ID, "prompt": "Once " * 10_000})
            assert_error(answer, 429, "queue_full")
            assert answer.headers["retry-after"] == "2"
            assert "connection" not in answer.headers
    served.engine.max_streams = 100


def test_a_refused_choice_takes_its_accepted_neighbours_with_it(client: openai.OpenAI, served: Served) -> None:
    served.engine.max_streams = 2
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model=MODEL_ID, prompt="x", n=5)
    assert served.engine.num_open == 0


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NonFiniteLogits("the model computed NaN for this request"), 500, "non_finite_logits"),
        (RankFailure("rank 1 died", rank=1), 503, "rank_failure"),
        (CheckpointChanged("consolidated.00.pth: rank 1 found other contents"), 503, "checkpoint_changed"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_error_before_the_first_token_is_a_status(
    served: Served, error: Exception, status: int, code: str, stream: bool
) -> None:
    served.engine.fail_at = (0, error)
    body = {"prompt": "x", "stream": stream, "n": 2}
    answer = http.post(served.url + "/v1/completions", json=body, headers={"x-request-id": "one"})
    assert_error(answer, status, code)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert answer.headers["x-request-id"] == "one"
    assert "secret" not in answer.text
    eventually(lambda: served.engine.num_open == 0)


def test_a_failed_choice_fails_the_whole_answer_and_cancels_the_others(served: Served) -> None:
    served.engine.step_s = 0.01
    served.engine.fail_at = (2, NonFiniteLogits("NaN"))
    served.engine.fail_prompt = lambda stream: stream is served.engine.streams[1]
    answer = http.post(served.url + "/v1/completions", json={"prompt": "x", "n": 4})
    assert_error(answer, 500, "non_finite_logits")
    eventually(lambda: served.engine.num_open == 0)
    assert [stream.cancelled for stream in served.engine.streams] == [True, False, True, True]


def test_a_loading_or_draining_server_answers_503_and_is_alive(served: Served) -> None:
    for phase in ("loading", "draining", "failed"):
        served.engine.state = Readiness(False, phase, "rank 1 of 2 has its weights", retry_after_s=2.5)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = http.post(served.url + path, json={"prompt": "x"})
            assert_error(answer, 503, "not_ready")
            assert answer.headers["retry-after"] == "3"
        ready = http.get(served.url + "/ready")
        assert ready.status_code == 503
        assert ready.headers["retry-after"] == "3"
        assert ready.json()["phase"] == phase
        assert ready.json()["error"]["code"] == "not_ready"
        assert http.get(served.url + "/health").status_code == 200
    served.engine.state = Readiness(True, "ready")
    assert http.get(served.url + "/ready").json() == {"ready": True, "phase": "ready", "detail": ""}
    served.engine.alive = False
    assert http.get(served.url + "/health").status_code == 503


def test_a_request_id_is_echoed_clean_and_bounded_or_made(served: Served) -> None:
    def answered(given: dict[str, str]) -> str:
        return http.get(served.url + "/health", headers=given).headers["x-request-id"]

    assert answered({"x-request-id": "abc-1.2:3_4"}) == "abc-1.2:3_4"
    assert answered({"x-request-id": "a<b>\tc d"}) == "abcd"
    assert len(answered({"x-request-id": "a" * 10_000})) == 128
    assert len({answered({}), answered({}), answered({"x-request-id": "<>"})}) == 3


def test_long_texts_of_all_routes_share_two_threads_and_more_than_may_wait_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_work, most = 0, 0
    go = threading.Event()
    text = "Once " * 10_000
    bodies: list[tuple[str, dict[str, object]]] = [
        ("/tokenize", {"prompt": text}),
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
    ]

    def encode(*_: object, **__: object) -> list[int]:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        assert go.wait(120)
        at_work -= 1
        return [1]

    def ask(number: int) -> httpx.Response:
        path, body = bodies[number % 2]
        return http.post(running.url + path, json=body, timeout=120)

    limits = HttpLimits(text=TextLimits(threads=2, max_chars=10 * len(text)))
    with serve(FakeEngine(), limits) as running, monkeypatch.context() as patched, ThreadPoolExecutor(14) as pool:
        patched.setattr(type(running.engine.tokenizer), "encode", encode)
        patched.setattr(type(running.engine.tokenizer), "min_tokens", lambda *_: 1)
        asking = [pool.submit(ask, number) for number in range(14)]
        refused, _ = wait(asking, 120, FIRST_COMPLETED)
        eventually(lambda: sum(one.done() for one in asking) == 4)
        go.set()
        answers = [one.result() for one in asking]
    assert most == 2
    assert sorted(answer.status_code for answer in answers) == [200] * 10 + [429] * 4
    for one in refused:
        assert_error(one.result(), 429, "queue_full")


def test_a_text_to_tokenize_has_a_bound(served: Served) -> None:
    too_long = http.post(served.url + "/tokenize", json={"prompt": "x" * (2**20 + 1)})
    assert_error(too_long, 400, "invalid_parameter")
    assert too_long.json()["error"]["message"] == "prompt: must have at most 1048576 characters"
    for text, status in (("🙂" * 2**18, 200), ("🙂" * 2**18 + "x", 400)):  # a byte may become a token
        assert http.post(served.url + "/tokenize", json={"prompt": text}).status_code == status


def test_text_survives_tokenize_and_detokenize(served: Served) -> None:
    def post(path: str, body: object) -> dict[str, object]:
        answer: dict[str, object] = http.post(served.url + path, json=body).json()
        return answer

    tokens = post("/tokenize", {"prompt": "Once upon a time 🙂"})
    assert post("/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": "Once upon a time 🙂"}
    bare = post("/tokenize", {"prompt": "Once upon a time 🙂", "add_special_tokens": False})
    assert tokens["tokens"] == [served.engine.tokenizer.bos_id, *bare["tokens"]]  # type: ignore[misc]
    assert tokens["max_model_len"] == MAX_SEQ_LEN
    chat = post("/tokenize", {"messages": [USER]})
    http.post(served.url + "/v1/chat/completions", json={"messages": [USER]})
    assert chat["tokens"] == served.engine.streams[-1].prompt
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    served.engine.max_seq_len = 4096
    offered = post("/tokenize", {"messages": [USER], "tools": tools})
    http.post(served.url + "/v1/chat/completions", json={"messages": [USER], "tools": tools})
    assert offered["tokens"] == served.engine.streams[-1].prompt != chat["tokens"]
    info = http.get(served.url + "/tokenizer_info").json()
    assert info["chat_template"] == served.engine.chat_format.client_template is not None
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")


def test_bad_ids_and_ambiguous_bodies_of_the_tokenizer_routes_are_400(served: Served) -> None:
    for tokens in ([-1], [10**6], [2**70], ["1"], [True], None):
        assert_error(http.post(served.url + "/detokenize", json={"tokens": tokens}), 400, "invalid_parameter")
    tool = {"type": "function", "function": {"name": "f"}}
    for body in ({}, {"prompt": "x", "messages": [USER]}, {"prompt": 3}, {"prompt": "x", "tools": [tool]}):
        assert_error(http.post(served.url + "/tokenize", json=body), 400, "invalid_parameter")


def test_props_docs_and_the_openapi_document_are_there(served: Served) -> None:
    assert http.get(served.url + "/props").json()["model"] == MODEL_ID
    assert http.get(served.url + "/docs").status_code == 200
    document = http.get(served.url + "/openapi.json").json()
    assert "temperature" in document["components"]["schemas"]["ChatBody"]["properties"]
    references = {word for word in json.dumps(document).split('"') if word.startswith("#/components/schemas/")}
    names = {reference.rsplit("/", 1)[1] for reference in references}
    assert {"ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody", "ChatMessage"} <= names
    assert names <= set(document["components"]["schemas"])


def test_each_request_is_one_line_of_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="llama.requests")
    body = {"prompt": ["a", "b b"], "n": 2, "max_tokens": 3, "temperature": 0.5, "top_p": 0.8}
    http.post(served.url + "/v1/completions", json=body, headers={"x-request-id": "r1"})
    http.post(served.url + "/v1/completions", json={"prompt": 3}, headers={"x-request-id": "r2"})
    lines = [record.getMessage() for record in caplog.records if record.name == "llama.requests"]
    first, second = lines
    levels = [record.levelno for record in caplog.records if record.name == "llama.requests"]
    assert levels == [logging.INFO] * 2, "a request that ends at its token limit is normal"
    fields = json.loads(first.removeprefix("request "))
    expected = {"request_id": "r1", "outcome": "ok", "batch_size": 2, "n": 2, "max_gen_len": 3, "temperature": 0.5,
                "top_p": 0.8, "generated": 12, "finish_reasons": {"length": 4}, "without_eos": 4}  # fmt: skip
    assert expected.items() <= fields.items()
    assert fields["ttft_ms"] >= 0
    assert fields["prompt_length"] == max(len(stream.prompt) for stream in served.engine.streams)
    assert json.loads(second.removeprefix("request "))["outcome"] == "invalid_parameter"


async def test_the_request_id_is_sent_once_behind_a_server_that_sends_it() -> None:
    app = build_http_app(FakeEngine(), Metrics(in_ray=False), sends_request_id=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        assert "x-request-id" not in (await client.get("/health", headers={"x-request-id": "abc"})).headers


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/ping",
        "/load",
        "/version",
        "/ready",
        "/metrics",
        "/v1/models",
        f"/v1/models/{MODEL_ID}",
        "/props",
    ],
)
def test_head_has_the_headers_of_get_without_a_body(served: Served, path: str) -> None:
    head, get = http.head(served.url + path), http.get(served.url + path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("//v1/models", "/v1/models"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/api/v1/completions", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
def test_a_wrong_base_url_is_told_the_path_that_exists(served: Served, path: str, meant: str) -> None:
    error = assert_error(http.post(served.url + path, json={}), 404, "not_found")
    assert str(error["message"]).startswith(
        f"There is no route POST {path}; GET /docs lists them. Did you mean {meant}?"
    )


def test_other_unknown_paths_get_no_suggestion_and_are_not_repeated(served: Served) -> None:
    for path in ("/v2/secret", "/v1/secret", "/v1/" * 50, "/v1/chat%0Acompletions"):
        error = assert_error(http.get(served.url + path), 404, "not_found")
        assert error["message"] == "There is no such route; GET /docs lists them."
    for path in ("/v1", "/v1/", "/v1/chat"):
        error = assert_error(http.get(served.url + path), 404, "not_found")
        assert error["message"] == f"There is no route GET {path}; GET /docs lists them."
    answer = http.request("SECRET", served.url + "/v1")
    assert "SECRET" not in answer.text


def test_context_overflow_has_the_words_that_langchain_and_litellm_look_for(served: Served) -> None:
    words = f"Input tokens exceed the configured limit of {MAX_SEQ_LEN} tokens"
    for path, body in (
        ("/v1/completions", {"prompt": "x " * 2 * MAX_SEQ_LEN}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2 * MAX_SEQ_LEN}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 2 * MAX_SEQ_LEN}]}),
    ):
        error = assert_error(http.post(served.url + path, json=body), 400, "context_length_exceeded")
        assert words in str(error["message"])


def test_the_name_of_one_control_token_is_that_token_without_special_tokens(served: Served) -> None:
    """lm-eval with tokenizer_backend=remote learns BOS so; pieces of text would make its log-likelihoods wrong."""
    tokenizer = served.engine.tokenizer

    def ids(**body: object) -> list[int]:
        tokens: list[int] = http.post(served.url + "/tokenize", json=body).json()["tokens"]
        return tokens

    assert ids(prompt="<s>", add_special_tokens=False) == [tokenizer.bos_id]
    assert ids(prompt="</s>", add_special_tokens=False) == [tokenizer.eos_id]
    pieces = tokenizer.encode("<s>", bos=False, eos=False)
    assert len(pieces) > 1
    assert ids(prompt="<s>", add_special_tokens=False, parse_special=False) == pieces
    assert ids(prompt="<s>") == [tokenizer.bos_id, *pieces]
    text = tokenizer.encode("<s> a", bos=False, eos=False)
    assert ids(prompt="<s> a", add_special_tokens=False) == text


def test_no_new_tokens_with_echo_score_the_prompt(served: Served, client: openai.OpenAI) -> None:
    prompts = ["Once upon", "a time"]
    fields = {"model": MODEL_ID, "prompt": prompts, "echo": True, "logprobs": 2, "n": 2}
    one = client.completions.create(**fields, max_tokens=1)
    none = client.completions.create(**fields, max_tokens=0)
    assert none.usage.completion_tokens == 0
    for with_token, without in zip(one.choices, none.choices, strict=True):
        assert without.finish_reason == "length"
        assert with_token.text.startswith(without.text) and without.text in prompts
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert getattr(without.logprobs, name) == getattr(with_token.logprobs, name)[:-1]
    body = {"prompt": "Once upon", "echo": True, "max_tokens": 0}
    assert http.post(served.url + "/v1/completions", json=body).json()["choices"][0]["text"] == "Once upon"
    parts = sse(http.post(served.url + "/v1/completions", json={**body, "stream": True, "logprobs": 1}).text)
    choices = [part["choices"][0] for part in parts]
    assert "".join(choice["text"] for choice in choices) == "Once upon"
    assert choices[-1]["finish_reason"] == "length"
    for path, bad in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [USER]})):
        assert_error(http.post(served.url + path, json={**bad, "max_tokens": 0}), 400, "invalid_parameter")


def test_minus_one_is_no_limit_and_top_p_zero_is_greedy(served: Served) -> None:
    bodies: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [USER]}),
    ]
    for path, body in bodies:
        sent = {**body, "max_tokens": -1, "top_p": 0, "temperature": 1.5}
        assert http.post(served.url + path, json=sent).status_code == 200
        stream = served.engine.streams[-1]
        assert stream.params.max_tokens == MAX_SEQ_LEN - len(stream.prompt)
        assert (stream.params.temperature, stream.params.top_p) == (0, 1)


def test_fields_that_change_nothing_are_accepted_and_a_service_tier_is_answered(served: Served) -> None:
    fields = {"metadata": {"a": "b"}, "user": "u", "store": False, "parallel_tool_calls": True, "service_tier": "auto"}
    answer = http.post(served.url + "/v1/chat/completions", json={"messages": [USER], **fields})
    assert (answer.status_code, answer.json()["service_tier"]) == (200, "default")
    assert answer.json()["system_fingerprint"].startswith("fp_")
    chunks = sse(http.post(served.url + "/v1/completions", json={"prompt": "x", "stream": True, **fields}).text)
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}
    assert "service_tier" not in http.post(served.url + "/v1/completions", json={"prompt": "x"}).json()


def test_a_field_that_is_not_supported_says_why_and_what_to_do(served: Served) -> None:
    for fields, words in (
        ({"suffix": "end"}, "before and after a gap"),
        ({"prediction": {"type": "content"}}, "docs/http.md"),
        ({"truncate_prompt_tokens": 5}, "never cut"),
    ):
        body = {"prompt": "x", **fields}
        error = assert_error(http.post(served.url + "/v1/completions", json=body), 400, "unsupported")
        assert "not supported by this server" in str(error["message"]) and words in str(error["message"])


def test_usage_in_a_stream_is_null_until_the_last_chunk_or_continuous(served: Served) -> None:
    def chunks(**options: bool) -> list[dict[str, Any]]:
        body = {"prompt": "x", "stream": True, "stream_options": options}
        return sse(http.post(served.url + "/v1/completions", json=body).text)

    *parts, last = chunks(include_usage=True)
    assert {part["usage"] for part in parts} == {None}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    *parts, last = chunks(include_usage=True, continuous_usage_stats=True)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"]
    assert all(part["usage"]["total_tokens"] > part["usage"]["completion_tokens"] for part in parts)


def test_best_of_returns_the_choices_with_the_highest_mean_logprob(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_seed(token: int, params: SamplingParams) -> TokenLogprob:
        value = -1.0 - seeds.index(params.seed) * 3 % 5  # of the five choices in order: -1, -4, -2, -5, -3
        return TokenLogprob(value, ((token, value),))

    seeds = [mix_seed(7, i) if i else 7 for i in range(5)]
    monkeypatch.setattr(served.engine, "logprob", by_seed)
    body = {"prompt": ["a", "b b"], "max_tokens": 4, "seed": 7, "best_of": 5, "n": 2}
    shown = http.post(served.url + "/v1/completions", json={**body, "logprobs": 1}).json()
    assert [choice["index"] for choice in shown["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in shown["choices"]] == [-1, -2, -1, -2]
    assert shown["usage"]["completion_tokens"] == 2 * 5 * 4, "tokens of the other choices count"
    plain = http.post(served.url + "/v1/completions", json={**body, "echo": True}).json()
    assert [choice["logprobs"] for choice in plain["choices"]] == [None] * 4
    assert plain["choices"][0]["text"] == "a" + shown["choices"][0]["text"]
    assert not any(stream.params.prompt_logprobs for stream in served.engine.streams[-10:])
    assert len(served.engine.streams) == 20
    http.post(served.url + "/v1/completions", json={"prompt": "x", "best_of": 2, "n": 2})
    assert served.engine.streams[-1].params.logprobs is None, "nothing is ranked"


def test_best_of_is_refused_where_it_cannot_work(served: Served) -> None:
    for fields in ({"best_of": 3, "stream": True}, {"best_of": 1, "n": 2}, {"best_of": 129}, {"best_of": 100, "n": 2}):
        body = {"prompt": ["x", "y"], **fields}
        error = assert_error(http.post(served.url + "/v1/completions", json=body), 400, "invalid_parameter")
        assert error["param"] == "best_of"
    body = {"prompt": "x", "best_of": 2, "n": 2, "stream": True}
    assert http.post(served.url + "/v1/completions", json=body).status_code == 200
