"""LiteLLM by its provider hosted_vllm: chat, streams, tools, structured output, and its classes of errors."""

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before the import: no download

import litellm

from tests.programs.clients.checks import (
    BASE_URL,
    MODEL,
    QUESTION,
    WEATHER,
    assert_weather,
    check,
    raised,
    run_checks,
)

litellm.suppress_debug_info = True
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
NAMED: Any = {"model": f"hosted_vllm/{MODEL}", "api_base": BASE_URL, "num_retries": 0}
CHAT: Any = NAMED | {"messages": MESSAGES, "seed": 1, "max_tokens": 40}
# LiteLLM removes additionalProperties from its caller's own schemas.
SCHEMA: Any = WEATHER | {"maxProperties": 2}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


@check
def a_chat_without_an_api_key_has_text_and_usage() -> None:
    answer = litellm.completion(**CHAT)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 0


@check
def streamed_pieces_joined_equal_the_whole() -> None:
    chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
    whole = litellm.completion(**CHAT)
    built: Any = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.completion_tokens == whole.usage.completion_tokens


@check
def a_tool_call_goes_round_trip() -> None:
    offered = CHAT | {"max_tokens": 100, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    answer = litellm.completion(**offered)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert_weather(call.function.arguments)
    built: Any = litellm.stream_chunk_builder(list(litellm.completion(**offered, stream=True)))
    assert built.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turn = [*MESSAGES, answer.choices[0].message, result]
    last = litellm.completion(**CHAT | {"messages": turn, "tools": [TOOL], "tool_choice": "none"})
    assert last.choices[0].message.content


@check
def structured_output_follows_its_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    assert_weather(litellm.completion(**CHAT | {"max_tokens": 200}, response_format=form).choices[0].message.content)


@check
def errors_map_to_the_classes() -> None:
    long = [{"role": "user", "content": "word " * 5000}]
    raised(litellm.ContextWindowExceededError, lambda: litellm.completion(**CHAT | {"messages": long}))
    raised(litellm.BadRequestError, lambda: litellm.completion(**CHAT | {"temperature": 9}))
    raised(litellm.NotFoundError, lambda: litellm.completion(**CHAT | {"model": "hosted_vllm/none"}))


@check
def a_fallback_answers_where_the_context_is_too_small() -> None:
    router = litellm.Router(
        model_list=[
            {"model_name": "small", "litellm_params": NAMED},
            {"model_name": "large", "litellm_params": NAMED | {"mock_response": "the answer of a larger model"}},
        ],
        context_window_fallbacks=[{"small": ["large"]}],
        num_retries=0,
    )
    answer = router.completion("small", [{"role": "user", "content": "word " * 5000}])
    assert answer.choices[0].message.content == "the answer of a larger model"


if __name__ == "__main__":
    run_checks()
