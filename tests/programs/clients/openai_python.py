"""The openai package for Python, majors 1 to 3: chat, completions, responses, tools, parsed answers, errors."""

import asyncio
from typing import Any

import openai

from tests.programs.clients.checks import (
    BASE_URL,
    LONG,
    MODEL,
    QUESTION,
    URL,
    WEATHER,
    assert_weather,
    check,
    raised,
    run_checks,
    wait_idle,
)
from tests.programs.clients.person import Person

client = openai.OpenAI(base_url=BASE_URL, api_key="none")
create: Any = client.chat.completions.create
complete: Any = client.completions.create
respond: Any = client.responses.create
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
CHAT: Any = {"model": MODEL, "messages": MESSAGES, "seed": 1, "max_tokens": 40}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}]


@check
def models_are_listed_and_retrieved() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def a_chat_has_text_usage_and_a_finish_reason() -> None:
    answer = create(**CHAT)
    assert answer.choices[0].message.content and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    cut = create(**CHAT | {"max_tokens": 2})
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 2)


@check
def streamed_pieces_joined_equal_the_whole() -> None:
    whole = create(**CHAT)
    chunks = list(create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens and not chunks[-1].choices
    text = {"model": MODEL, "prompt": "Question: ", "seed": 1, "max_tokens": 20}
    assert "".join(c.choices[0].text for c in complete(**text, stream=True)) == complete(**text).choices[0].text


@check
def log_probabilities_have_their_shapes() -> None:
    content = create(**CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 and bytes(token.bytes) for token in content)
    logprobs = complete(model=MODEL, prompt="Question", max_tokens=3, logprobs=2, seed=1).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 3


@check
def a_tool_call_goes_round_trip() -> None:
    offered = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
    answer = create(**CHAT | offered)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert_weather(call.function.arguments)
    deltas = [c.choices[0].delta for c in create(**CHAT | offered, stream=True) if c.choices]
    pieces = [piece.function.arguments or "" for delta in deltas for piece in delta.tool_calls or []]
    assert len(pieces) > 1 and "".join(pieces) == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*MESSAGES, answer.choices[0].message.model_dump(exclude_none=True), result]
    assert create(**CHAT | {"messages": messages, "tools": TOOLS, "tool_choice": "none"}).choices[0].message.content


@check
def a_parsed_answer_is_a_model() -> None:
    parse: Any = client.chat.completions.parse
    person = parse(**CHAT | {"max_tokens": 300}, response_format=Person).choices[0].message.parsed
    assert isinstance(person, Person)
    with client.chat.completions.stream(**CHAT | {"max_tokens": 300}, response_format=Person) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.parsed == person
    assert "content.delta" in kinds and "content.done" in kinds


@check
def responses_answer_stream_and_call_tools() -> None:
    whole = respond(model=MODEL, input=QUESTION, max_output_tokens=60, temperature=0)
    assert whole.status == "completed" and whole.output_text and whole.usage.output_tokens > 0
    events = list(respond(model=MODEL, input=QUESTION, max_output_tokens=60, temperature=0, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    called = respond(model=MODEL, input=QUESTION, tools=[tool], tool_choice="required")
    calls = [item for item in called.output if item.type == "function_call"]
    assert_weather(calls[0].arguments)
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    turn = [{"role": "user", "content": QUESTION}, *(item.model_dump() for item in called.output), *results]
    assert respond(model=MODEL, input=turn, tools=[tool], tool_choice="none", max_output_tokens=20).output_text
    parsed: Any = client.responses.parse(model=MODEL, input=QUESTION, text_format=Person, max_output_tokens=300)
    assert isinstance(parsed.output_parsed, Person)


@check
def errors_map_to_the_classes() -> None:
    wrong = raised(openai.BadRequestError, lambda: create(**CHAT | {"temperature": 9}))
    assert (wrong.code, wrong.param) == ("invalid_parameter", "temperature")
    long = [{"role": "user", "content": "word " * 5000}]
    error = raised(openai.BadRequestError, lambda: create(**CHAT | {"messages": long}))
    assert error.code == "context_length_exceeded"
    assert raised(openai.NotFoundError, lambda: create(**CHAT | {"model": "none"})).code == "model_not_found"
    misplaced: Any = openai.OpenAI(base_url=URL, api_key="none").chat.completions.create
    assert "/v1" in str(raised(openai.NotFoundError, lambda: misplaced(**CHAT)))


@check
def a_timeout_and_a_closed_stream_free_the_server() -> None:
    quick: Any = client.with_options(timeout=0.3, max_retries=0).chat.completions.create
    raised(openai.APITimeoutError, lambda: quick(model=MODEL, messages=MESSAGES, **LONG))
    wait_idle()
    stream = create(model=MODEL, messages=MESSAGES, **LONG, stream=True)
    next(iter(stream))
    stream.close()
    wait_idle()


@check
async def the_asynchronous_client_streams_side_by_side() -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none") as other:
        start: Any = other.chat.completions.create

        async def text(seed: int) -> str:
            stream = await start(**CHAT | {"seed": seed, "temperature": 1}, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

        together = await asyncio.gather(*(text(seed) for seed in range(8)))
        assert together[3] == await text(3)


@check
def raw_answers_have_the_request_id() -> None:
    raw: Any = client.chat.completions.with_raw_response.create
    answer = raw(**CHAT, extra_headers={"X-Request-ID": "one-of-mine"})
    assert answer.headers["x-request-id"] == "one-of-mine"
    assert answer.parse()._request_id == "one-of-mine"
    assert answer.http_response.json()["model"] == MODEL


if __name__ == "__main__":
    run_checks()
