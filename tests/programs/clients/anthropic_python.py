"""The anthropic package: messages, streamed events, tools, token counts, errors."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic

from tests.programs.clients.checks import (
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

EXAMPLES = Path(__file__).parents[3] / "examples"
client = anthropic.Anthropic(base_url=URL, api_key="none")
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
ASK: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "extra_body": {"temperature": 0}}
TOOLS: Any = [{"name": "get_weather", "description": "The weather.", "input_schema": WEATHER}]
FORCED: Any = ASK | {
    "max_tokens": 100,
    "tools": TOOLS,
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@check
def a_message_has_text_usage_and_a_stop_reason() -> None:
    message = client.messages.create(**ASK, system="Answer briefly.")
    assert message.role == "assistant" and message.content[0].text
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0
    cut = client.messages.create(**ASK | {"max_tokens": 2})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


@check
def streamed_pieces_joined_equal_the_whole() -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


@check
def a_stream_whose_connection_breaks_goes_on() -> None:
    command = [sys.executable, str(EXAMPLES / "resume_stream.py"), "--anthropic", "--base-url", URL]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.count("broken on purpose") == 2 and printed.strip()


@check
def a_tool_call_goes_round_trip() -> None:
    whole = client.messages.create(**FORCED)
    assert whole.stop_reason == "tool_use"
    (call,) = (block for block in whole.content if block.type == "tool_use")
    assert_weather(call.input)
    with client.messages.stream(**FORCED) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = (block for block in stream.get_final_message().content if block.type == "tool_use")
    assert "input_json" in kinds and streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turn = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**ASK | {"messages": turn, "tools": TOOLS, "tool_choice": {"type": "none"}})
    assert answer.content[0].type == "text"


@check
def tokens_are_counted_as_a_message_has_them() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    usage = client.messages.create(**ASK).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@check
def models_are_listed_and_retrieved() -> None:
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == (MODEL, MODEL, "model")
    assert model.created_at.tzinfo is not None and model.max_input_tokens
    assert client.models.retrieve(MODEL) == model


@check
def stop_sequences_are_named() -> None:
    text = client.messages.create(**ASK).content[0].text
    stop = text.split()[1]
    message = client.messages.create(**ASK, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert stop not in "".join(block.text for block in message.content)


@check
def errors_map_to_the_classes() -> None:
    ask = client.messages.create
    wrong = raised(anthropic.BadRequestError, lambda: ask(**ASK | {"extra_body": {"temperature": 9}}))
    assert wrong.body["error"]["type"] == "invalid_request_error" and "temperature" in wrong.body["error"]["message"]
    raised(anthropic.NotFoundError, lambda: ask(**ASK | {"model": "none"}))
    long: Any = [{"role": "user", "content": "word " * 5000}]
    assert "tokens" in str(raised(anthropic.BadRequestError, lambda: ask(**ASK | {"messages": long})))


@check
def a_timeout_and_a_closed_stream_free_the_server() -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 400}
    schema = {"type": "object", "properties": {"numbers": numbers}, "required": ["numbers"]}
    long: Any = FORCED | {"max_tokens": 1500, "tools": [{"name": "add", "input_schema": schema}]}
    quick = client.with_options(timeout=0.3, max_retries=0)
    raised(anthropic.APITimeoutError, lambda: quick.messages.create(**long))
    wait_idle()
    with client.messages.stream(**long) as stream:
        next(iter(stream))
    wait_idle()


@check
async def the_asynchronous_client_streams() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none") as other, other.messages.stream(**ASK) as stream:
        text = "".join([piece async for piece in stream.text_stream])
    assert text == client.messages.create(**ASK).content[0].text


if __name__ == "__main__":
    run_checks()
