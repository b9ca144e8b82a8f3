"""vLLM's `prompt_logprobs` on the generating routes: the same numbers as an echoed prompt has."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support import http
from tests.support.scripted_engine import FakeEngine, Served, serve

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Once upon"}]}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(FakeEngine("Hello you.")) as running:
        yield running


def post(served: Served, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    body = {"prompt": "Once upon", "max_tokens": 8, "seed": 1} if path == "/v1/completions" else CHAT
    return http.post(served.url + path, json=body | fields)


@pytest.mark.parametrize("num_top", [0, 3])
def test_each_token_of_the_prompt_has_itself_and_the_likeliest_ones(served: Served, num_top: int) -> None:
    (choice,) = post(served, prompt_logprobs=num_top).json()["choices"]
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
    (echoed,) = post(served, echo=True, logprobs=1).json()["choices"]
    (asked,) = post(served, prompt_logprobs=1).json()["choices"]
    stream = served.engine.streams[-1]
    pairs = zip(stream.prompt[1:], asked["prompt_logprobs"][1:], strict=True)
    found = [entry[str(token)]["logprob"] for token, entry in pairs]
    assert found == echoed["logprobs"]["token_logprobs"][1 : len(stream.prompt)]


def test_both_kinds_have_as_many_alternatives_as_each_asks_for(served: Served) -> None:
    (choice,) = post(served, prompt_logprobs=4, logprobs=1).json()["choices"]
    assert all(len(entry) >= 4 for entry in choice["prompt_logprobs"][1:])
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])
    (alone,) = post(served, logprobs=1).json()["choices"]
    assert alone["logprobs"] == choice["logprobs"] and "prompt_logprobs" not in alone
    (other,) = post(served, prompt_logprobs=0, logprobs=5).json()["choices"]
    assert all(len(entry) == 1 for entry in other["prompt_logprobs"][1:])


def test_a_chat_has_them_once_beside_its_choices(served: Served) -> None:
    answer = post(served, "/v1/chat/completions", prompt_logprobs=2, n=2).json()
    assert len(answer["choices"]) == 2 and len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert not any("prompt_logprobs" in choice or choice["logprobs"] for choice in answer["choices"])
    assert [stream.params.prompt_logprobs for stream in served.engine.streams[-2:]] == [True, False]
    assert "prompt_logprobs" not in post(served, "/v1/chat/completions").json()


def test_every_choice_has_those_of_its_own_prompt(served: Served) -> None:
    answer = post(served, prompt=["Once", "Once upon a time"], n=2, prompt_logprobs=0).json()
    lists = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert lists[0] == lists[1] != lists[2] == lists[3]
    (best,) = post(served, prompt_logprobs=1, best_of=3).json()["choices"]
    assert len(best["prompt_logprobs"]) == len(served.engine.streams[-1].prompt) and best["logprobs"] is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("fields", [{"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"stream": True}])
def test_what_cannot_be_answered_is_400(served: Served, path: str, fields: dict[str, Any]) -> None:
    refused = post(served, path, **{"prompt_logprobs": 1} | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_a_request_for_too_many_is_refused_by_the_field_that_asks_for_them(served: Served) -> None:
    prompt = [[5] * 200] * 100
    refused = post(served, prompt=prompt, prompt_logprobs=20)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert "262144" in refused.json()["error"]["message"]
