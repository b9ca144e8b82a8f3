"""The routes that tokenize and detokenize, and how much text the routes take."""

from collections.abc import Iterator

import pytest

from tests.support import http
from tests.support.scripted_engine import MAX_SEQ_LEN, FakeEngine, Served, assert_error, canary, serve

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(FakeEngine("Hello there, 🙂 how are you?")) as running:
        yield running
        canary(running)


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
