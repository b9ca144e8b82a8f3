"""Log-probabilities of answers and of prompts in the shapes that clients read, streamed and not."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

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


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Once upon"}]}


def prompts_of(served: Served, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    body = {"prompt": "Once upon", "max_tokens": 8, "seed": 1} if path == "/v1/completions" else CHAT
    return http.post(served.url + path, json=body | fields)


@pytest.mark.parametrize("num_top", [0, 3])
def test_each_token_of_the_prompt_has_itself_and_the_likeliest_ones(served: Served, num_top: int) -> None:
    (choice,) = prompts_of(served, prompt_logprobs=num_top).json()["choices"]
    stream = served.engine.streams[-1]
    first, *entries = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None
    assert [int(next(iter(entry))) for entry in entries] == stream.prompt[1:]
    names = served.engine.tokenizer.token_name
    for token, entry, expected in zip(stream.prompt[1:], entries, stream.prompt_logprobs, strict=True):
        assert len(entry) in (max(1, num_top), num_top + 1)
        assert entry[str(token)]["logprob"] == expected.logprob
        for rank, (token_id, logprob) in enumerate(expected.top[:num_top], 1):
            assert entry[str(token_id)] == {"logprob": logprob, "rank": rank, "decoded_token": names(token_id)}


def test_the_numbers_are_those_of_an_echoed_prompt(served: Served) -> None:
    (echoed,) = prompts_of(served, echo=True, logprobs=1).json()["choices"]
    (asked,) = prompts_of(served, prompt_logprobs=1).json()["choices"]
    stream = served.engine.streams[-1]
    pairs = zip(stream.prompt[1:], asked["prompt_logprobs"][1:], strict=True)
    found = [entry[str(token)]["logprob"] for token, entry in pairs]
    assert found == echoed["logprobs"]["token_logprobs"][1 : len(stream.prompt)]


def test_a_chat_has_them_once_beside_its_choices(served: Served) -> None:
    answer = prompts_of(served, "/v1/chat/completions", prompt_logprobs=2, n=2).json()
    assert len(answer["choices"]) == 2 and len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert not any("prompt_logprobs" in choice or choice["logprobs"] for choice in answer["choices"])
    assert [stream.params.prompt_logprobs for stream in served.engine.streams[-2:]] == [True, False]
    assert "prompt_logprobs" not in prompts_of(served, "/v1/chat/completions").json()


def test_every_choice_has_those_of_its_own_prompt(served: Served) -> None:
    answer = prompts_of(served, prompt=["Once", "Once upon a time"], n=2, prompt_logprobs=0).json()
    lists = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert lists[0] == lists[1] != lists[2] == lists[3]
    (best,) = prompts_of(served, prompt_logprobs=1, best_of=3).json()["choices"]
    assert len(best["prompt_logprobs"]) == len(served.engine.streams[-1].prompt) and best["logprobs"] is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("fields", [{"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"stream": True}])
def test_what_cannot_be_answered_is_400(served: Served, path: str, fields: dict[str, Any]) -> None:
    refused = prompts_of(served, path, **{"prompt_logprobs": 1} | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
