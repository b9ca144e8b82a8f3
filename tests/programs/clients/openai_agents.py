"""openai-agents over responses, its default, and over chat: text, streams, tools, output types, handoffs."""

from typing import Annotated, Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, BadRequestError
from pydantic import Field

from tests.programs.clients.checks import BASE_URL, MODEL, QUESTION, check, run_checks
from tests.programs.clients.person import Person

set_tracing_disabled(True)  # traces would go to OpenAI
KINDS: Any = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
Digit = Annotated[int, Field(ge=0, le=9)]
seen: list[int] = []


def multiply(a: Digit, b: Digit) -> int:
    """The product of two numbers."""
    seen.append(a * b)
    return a * b


def agent(kind: Any, limit: int = 200, tool_choice: str | None = None, **options: Any) -> Any:
    """A new agent, whose client belongs to the event loop of one check."""
    settings = ModelSettings(temperature=0, max_tokens=limit, tool_choice=tool_choice)
    model = kind(MODEL, AsyncOpenAI(base_url=BASE_URL, api_key="none"))
    return Agent(name="helper", instructions="Answer briefly.", model=model, model_settings=settings, **options)


@check
async def streamed_pieces_joined_equal_the_whole() -> None:
    for kind in KINDS:
        whole = await Runner.run(agent(kind, 40), QUESTION)
        streamed = Runner.run_streamed(agent(kind, 40), QUESTION)
        raw = [event.data async for event in streamed.stream_events() if event.type == "raw_response_event"]
        pieces = [data.delta for data in raw if data.type == "response.output_text.delta"]
        assert "".join(pieces) == whole.final_output == streamed.final_output, kind


@check
async def an_output_type_is_parsed() -> None:
    for kind in KINDS:
        result = await Runner.run(agent(kind, output_type=Person), QUESTION)
        assert isinstance(result.final_output, Person), kind


@check
async def a_tool_is_called_and_its_result_is_answered() -> None:
    for kind in KINDS:
        seen.clear()
        # The runner goes back to `auto` behind the first call.
        asked = agent(kind, tool_choice="required", tools=[function_tool(multiply)])
        result = await Runner.run(asked, QUESTION, max_turns=4)
        assert seen and result.final_output is not None, kind
        kinds = [item.type for item in result.new_items]
        assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] or "tool_call_output_item" in kinds, kinds


@check
async def a_handoff_reaches_the_other_agent() -> None:
    for kind in KINDS:
        other = agent(kind, 40)
        other.name = "other"
        result = await Runner.run(agent(kind, tool_choice="required", handoffs=[other]), QUESTION, max_turns=3)
        assert result.last_agent.name == "other" and result.final_output, kind


@check
async def errors_keep_their_class() -> None:
    for kind in KINDS:
        seen_code = None
        try:
            await Runner.run(agent(kind), "word " * 5000)
        except BadRequestError as error:
            seen_code = error.code
        assert seen_code == "context_length_exceeded", kind


if __name__ == "__main__":
    run_checks()
