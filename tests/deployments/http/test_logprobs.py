"""Log-probabilities in the shapes that clients read, streamed and not."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from deployments.http.logprobs import ChatLogprobs, CompletionLogprobs
from llama_core.scheduling.request import TokenLogprob
from tests.support import http
from tests.support.scripted_engine import MODEL_ID, FakeEngine, Served, serve, sse


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(FakeEngine("Hello 🙂 you.")) as running:
        yield running


def completion(served: Served, **fields: Any) -> httpx.Response:
    return http.post(served.url + "/v1/completions", json={"prompt": "Once upon", "max_tokens": 50} | fields)


def test_completion_logprobs_have_four_lists_of_one_length(served: Served) -> None:
    choice = completion(served, logprobs=2).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    num_tokens = len(served.engine.streams[-1].answer)
    assert {len(values) for values in logprobs.values()} == {num_tokens}
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob == max(top.values())  # equal floats, as lm-eval compares them
        assert 2 <= len(top) <= 3


def test_offsets_point_at_each_token_in_the_text(served: Served) -> None:
    for echo in (False, True):
        choice = completion(served, logprobs=1, echo=echo).json()["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith(("bytes:", "<")) and offset > 0:
                assert text[offset:].startswith(token)
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        assert text.startswith("Once upon") == echo


def test_a_scored_prompt_has_an_entry_behind_it_where_the_model_would_end_the_text(served: Served) -> None:
    def ignores_eos(**fields: Any) -> bool:
        assert completion(served, **fields).status_code == 200
        return served.engine.streams[-1].params.ignore_eos

    assert ignores_eos(echo=True, logprobs=1, max_tokens=1)  # lm-eval cuts the last entry off
    assert not ignores_eos(echo=True, logprobs=1, max_tokens=2)
    assert not ignores_eos(echo=True, max_tokens=1)
    assert not ignores_eos(logprobs=1, max_tokens=1)


def test_an_echoed_prompt_has_its_logprobs_first_as_lm_eval_reads_them(served: Served) -> None:
    context, continuation = [5, 300, 301], [302, 303]
    answer = completion(served, prompt=[context + continuation] * 2, echo=True, max_tokens=1, logprobs=1, seed=1234)
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    assert len(choices) == 2
    logprobs = choices[0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    scored = logprobs["token_logprobs"][len(context) : -1]
    assert len(scored) == len(continuation)
    tops = logprobs["top_logprobs"][len(context) : -1]
    assert [max(top.values()) for top in tops] == scored


def test_a_streams_logprobs_add_up_to_the_whole_answers(served: Served) -> None:
    for echo in (False, True):
        whole = completion(served, logprobs=2, echo=echo).json()["choices"][0]
        chunks = [chunk["choices"][0] for chunk in sse(completion(served, logprobs=2, echo=echo, stream=True).text)]
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        for name, values in whole["logprobs"].items():
            assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values


def test_chat_logprobs_are_what_the_openai_package_expects(served: Served) -> None:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL_ID, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=3
        )
        bare = client.chat.completions.create(
            model=MODEL_ID, messages=[{"role": "user", "content": "hi"}], logprobs=True
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert entry.top_logprobs[0].token == entry.token
    raw = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert raw.decode() == " " + (answer.choices[0].message.content or "")
    assert bare.choices[0].logprobs is not None
    assert all(entry.top_logprobs == [] for entry in bare.choices[0].logprobs.content or [])


def test_an_answer_has_no_logprobs_unless_asked(served: Served) -> None:
    assert completion(served).json()["choices"][0]["logprobs"] is None
    assert completion(served, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"]


def test_two_ids_with_one_text_keep_the_likelier_and_infinity_becomes_a_number() -> None:
    tokenizer = FakeEngine().tokenizer
    byte_token, letter = (i for i in range(tokenizer.n_words) if tokenizer.token_bytes(i) == b"A")
    assert tokenizer.token_name(byte_token) == tokenizer.token_name(letter) == "A"
    entry = TokenLogprob(-3.0, ((letter, -0.5), (byte_token, -3.0), (5, float("-inf"))))
    completion = CompletionLogprobs(tokenizer, 3, [])
    written = json.loads(completion.written([completion.take([byte_token], [entry])]))
    assert written["top_logprobs"] == [{"A": -0.5, tokenizer.token_name(5): -9999.0}]
    assert written["token_logprobs"] == [-3.0]
    chat = ChatLogprobs(tokenizer, 3)
    content = json.loads(chat.written([chat.take([byte_token], [entry])]))["content"]
    assert content[0]["top_logprobs"][2]["logprob"] == -9999.0
