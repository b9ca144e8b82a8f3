"""A refused prompt costs little: encoding stops when the refusal is certain, and long texts are encoded in threads."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from llama_core.text.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from tests.support.scripted_engine import MAX_SEQ_LEN, FakeEngine, ask

TOO_LONG = "zq" * MAX_SEQ_LEN  # more tokens than the context holds; the number of characters alone does not show it
ANSWER = FakeEngine().answer


class Encoded:
    """The texts that were encoded, and the threads that encoded them."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.threads: set[threading.Thread] = set()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoded]:
    kind = type(FakeEngine().tokenizer)
    seen, encode = Encoded(), kind.encode

    def recorded(self: Any, s: str, *, bos: bool, eos: bool) -> list[int]:
        if s != ANSWER:  # the scripted engine encodes this one
            seen.texts.append(s)
            seen.threads.add(threading.current_thread())
        return encode(self, s, bos=bos, eos=eos)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "encode", recorded)
        yield seen


async def post(engine: FakeEngine, **body: Any) -> httpx.Response:
    return await ask(engine, "/v1/chat/completions" if "messages" in body else "/v1/completions", body)


def code(answer: httpx.Response) -> str:
    error: dict[str, str] = answer.json()["error"]
    return error["code"]


async def test_no_prompt_is_encoded_after_one_that_does_not_fit(encoded: Encoded) -> None:
    answer = await post(FakeEngine(), prompt=["a", TOO_LONG, *"bcdefgh"], max_tokens=1)
    assert (answer.status_code, code(answer)) == (400, "context_length_exceeded")
    assert encoded.texts == ["a", TOO_LONG]


async def test_no_prompt_is_encoded_after_their_sum_exceeds_what_one_request_may_have(encoded: Encoded) -> None:
    engine = FakeEngine()
    engine.max_request_tokens = 500
    answer = await post(engine, prompt=["zq" * 100] * 20, max_tokens=1)
    assert (answer.status_code, code(answer)) == (400, "invalid_parameter")
    assert "500 tokens" in answer.json()["error"]["message"]
    assert len(encoded.texts) == 5  # of 100 tokens each


async def test_nothing_is_encoded_of_prompts_that_their_characters_rule_out(encoded: Encoded) -> None:
    engine = FakeEngine()
    assert isinstance(engine.tokenizer, SentencePieceTokenizer)
    longest = MAX_SEQ_LEN * engine.tokenizer.max_piece_chars
    for prompts in (["a", "x" * longest], ["x" * (longest // 2)] * 128):
        engine.max_request_tokens = 60 * MAX_SEQ_LEN
        answer = await post(engine, prompt=prompts, max_tokens=1)
        assert answer.status_code == 400
    answer = await post(engine, messages=[{"role": "user", "content": "x" * longest}])
    assert (answer.status_code, code(answer)) == (400, "context_length_exceeded")
    assert encoded.texts == []


@pytest.mark.parametrize(("num_prompts", "is_on_loop"), [(10, True), (100, False)])
async def test_the_characters_of_all_prompts_decide_where_they_are_encoded(
    encoded: Encoded, num_prompts: int, is_on_loop: bool
) -> None:
    answer = await post(FakeEngine(), prompt=["Once upon a time " * 10] * num_prompts, max_tokens=1)
    assert answer.status_code == 200
    assert len(encoded.threads) == 1
    assert (threading.current_thread() in encoded.threads) == is_on_loop


async def test_a_long_dialog_is_encoded_beside_the_event_loop(encoded: Encoded) -> None:
    engine = FakeEngine()
    engine.max_seq_len = 2**16
    engine.max_request_tokens = 2**17
    content = "Once upon a time " * 1000
    assert (await post(engine, messages=[{"role": "user", "content": content}], max_tokens=1)).status_code == 200
    assert threading.current_thread() not in encoded.threads


async def test_a_chat_may_leave_room_for_one_token_and_no_fewer() -> None:
    engine = FakeEngine()
    messages: list[Any] = [{"role": "user", "content": "Once upon a time"}]
    num_tokens = len(engine.chat_format.encode(messages))
    for max_seq_len, status in ((num_tokens + 1, 200), (num_tokens, 400)):
        engine.max_seq_len = max_seq_len
        assert (await post(engine, messages=messages)).status_code == status
