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
def models_are_listed_and_retrieved() -> None:
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == (MODEL, MODEL, "model")
    assert model.created_at.tzinfo is not None and model.max_input_tokens
    assert client.models.retrieve(MODEL) == model


@check
def errors_map_to_the_classes() -> None:
    ask = client.messages.create
    wrong = raised(anthropic.BadRequestError, lambda: ask(**ASK | {"extra_body": {"temperature": 9}}))
    assert wrong.body["error"]["type"] == "invalid_request_error" and "temperature" in wrong.body["error"]["message"]
    raised(anthropic.NotFoundError, lambda: ask(**ASK | {"model": "none"}))
    long: Any = [{"role": "user", "content": "word " * 5000}]
    assert "tokens" in str(raised(anthropic.BadRequestError, lambda: ask(**ASK | {"messages": long})))


if __name__ == "__main__":
    run_checks()
