"""Completions and chats as the official openai package asks for them."""

import re
from collections.abc import Iterator

import httpx
import openai
import pytest

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


def test_context_overflow_has_the_words_that_langchain_and_litellm_look_for(served: Served) -> None:
    words = f"Input tokens exceed the configured limit of {MAX_SEQ_LEN - 1} tokens, the context of {MAX_SEQ_LEN}"
    for path, body in (
        ("/v1/completions", {"prompt": "x " * 2 * MAX_SEQ_LEN}),
        ("/v1/completions", {"prompt": [5] * MAX_SEQ_LEN, "max_tokens": 99}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 2 * MAX_SEQ_LEN}]}),
        ("/v1/responses", {"input": "x " * 2 * MAX_SEQ_LEN, "truncation": "auto"}),
    ):
        error = assert_error(http.post(served.url + path, json=body), 400, "context_length_exceeded")
        message, field = str(error["message"]), next(iter(body))
        assert message.startswith(f"{field}: {words}") and error["param"] == field
        assert re.search(r"shorten the prompt, which has (at least )?\d+ tokens$", message)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_over_the_rest_of_the_context_is_cut_to_it(path: str, name: str, stream: bool, served: Served) -> None:
    served.engine.answer = "word " * MAX_SEQ_LEN
    name = "max_output_tokens" if path == "/v1/responses" else name
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    asked = "x" if field != "messages" else [{"role": "user", "content": "x"}]
    body = {field: asked, name: 32_000, "stream": stream}
    answer = http.post(served.url + path, json=body)
    assert answer.status_code == 200, answer.text
    assert ('"status":"incomplete"' if path == "/v1/responses" else '"finish_reason":"length"') in answer.text
    sent = served.engine.streams[-1]
    assert sent.params.max_tokens == MAX_SEQ_LEN - len(sent.prompt)
    served.engine.answer = "Still here."


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
