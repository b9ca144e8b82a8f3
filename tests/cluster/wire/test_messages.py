"""Messages as bytes: decoding inverts encoding for pieces of any size, and refuses other bytes."""

from dataclasses import replace
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.wire import messages as wire
from cluster.wire.messages import Ack, Answer, Deframer, Fault, Hello, WireError
from llama_core.scheduling.sampling_params import (
    INT64_MAX,
    INT64_MIN,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    SamplingParams,
)
from llama_core.scheduling.step import AdapterLoad, Draft, Grow, Row, SlotInit, StepInput
from tests.support.full_runs import examples

ids = st.integers(0, 2**31)
OF_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: ids,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=9),
    type(None): st.none(),
    SamplingParams: st.builds(
        SamplingParams,
        temperature=st.floats(0, MAX_TEMPERATURE),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(0, MAX_TOP_K),
        seed=st.integers(INT64_MIN, INT64_MAX),
        max_tokens=st.integers(0, INT64_MAX),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.booleans(),
        include_stop_str_in_output=st.booleans(),
        min_p=st.floats(0, 1),
        stop_token_ids=st.lists(ids, max_size=3).map(tuple),
        logit_bias=st.lists(st.tuples(ids, st.floats(-100, 100)), max_size=3).map(tuple),
        bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        grammar=st.sampled_from(("", "start: /a+/")),
    ),
}


def of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if kind in OF_TYPE:
        return OF_TYPE[kind]
    origin, parts = get_origin(kind), [of(each) for each in get_args(kind) if each is not ...]
    if origin in (list, dict):
        return st.lists(parts[0], max_size=4) if origin is list else st.dictionaries(*parts, max_size=4)
    if origin is tuple:
        return st.lists(parts[0], max_size=4).map(tuple) if ... in get_args(kind) else st.tuples(*parts)
    if parts:
        return st.one_of(parts)
    return st.builds(kind, **{name: of(each) for name, each in get_type_hints(kind).items()})


steps, replies = of(StepInput), of(Answer | Ack | Fault)


def payload_of(message: StepInput | wire.Reply | Hello) -> bytes:
    (payload,) = Deframer().feed(wire.frame(message))
    return payload


@given(steps)
def test_a_decoded_step_equals_the_encoded_step(step: StepInput) -> None:
    assert wire.decode_step(payload_of(step)) == step


@given(replies)
def test_a_decoded_reply_equals_the_encoded_reply(reply: wire.Reply) -> None:
    assert wire.decode_reply(payload_of(reply)) == reply


@settings(max_examples=examples(20, 40))  # each is several of the messages above
@given(st.lists(steps, min_size=1, max_size=4), st.integers(1, 50))
def test_frames_are_read_from_pieces_of_any_size(messages: list[StepInput], piece_bytes: int) -> None:
    stream = b"".join(wire.frame(message) for message in messages)
    deframer = Deframer()
    payloads = [
        payload
        for start in range(0, len(stream), piece_bytes)
        for payload in deframer.feed(stream[start : start + piece_bytes])
    ]
    assert [wire.decode_step(payload) for payload in payloads] == messages


def test_a_length_over_the_limit_is_refused_before_its_bytes_arrive() -> None:
    with pytest.raises(WireError, match="over the limit"):
        list(Deframer(256).feed((257).to_bytes(4, "big")))


def test_the_largest_step_is_within_its_bound_and_the_bound_is_close() -> None:
    big = 2**31 - 1  # five bytes, like every token and block may need
    params = SamplingParams(
        temperature=0.61, top_p=0.91, top_k=big, seed=2**63 - 1, max_tokens=2**63 - 1, logprobs=20, prompt_logprobs=True,
        min_p=0.11, presence_penalty=0.13, frequency_penalty=0.17, repetition_penalty=1.13, min_tokens=2**63 - 1,
        stop_token_ids=(big,) * MAX_STOP_TOKENS, logit_bias=((big, 0.1),) * MAX_LOGIT_BIASES,
        bad_words=((big,) * MAX_BAD_WORD_TOKENS,) * MAX_BAD_WORDS, allowed_token_ids=(big,) * MAX_ALLOWED_TOKENS,
        include_stop_str_in_output=True, grammar="g" * MAX_GRAMMAR_BYTES,
    )  # fmt: skip
    delayed = (big,) * (MAX_STOP_TOKENS + 64)
    admit = [SlotInit(big, [big] * 4096, [big] * 256, params, True, big, delayed, "f" * 32, big) for _ in range(32)]
    rows, grow = [Row(big, big, big, True, big)] * 32, [Grow(big, big)] * 32
    step = StepInput(big, big, rows, admit=admit, grow=grow, drafts=[Draft(big, big, [big] * 8)] * 32)
    step = replace(step, adapters=[AdapterLoad(big, "d" * 64, "/" * 4096)] * 32)
    bound = wire.largest_step_bytes(32, 4096, 256)
    assert 0.98 * bound < len(payload_of(step)) <= bound


def test_a_secret_is_never_printed() -> None:
    from cluster.wire.tls import GroupKey
    from cluster.wire.transport import Invitation

    shown = repr(Invitation(0, b"the secret", key=GroupKey("public", "private part")))
    assert "the secret" not in shown
    assert "private part" not in shown
