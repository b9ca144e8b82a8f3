"""LangChain's ChatOpenAI: text, streams, structured output, tools, an agent, and a fallback where the context is too small."""

import itertools
from typing import Any

import openai
from langchain.agents import create_agent
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.programs.clients.checks import BASE_URL, MODEL, QUESTION, assert_weather, check, raised, run_checks
from tests.programs.clients.person import Person

OPTIONS: Any = {"base_url": BASE_URL, "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0}
model = ChatOpenAI(**OPTIONS, max_tokens=200)


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: str = Field(pattern="^[A-Z][a-z]{1,9}$")
    days: int = Field(ge=1, le=9)


def sunny(city: str, days: int) -> str:
    return f"It is sunny in {city} for {days} days."


get_weather = StructuredTool.from_function(sunny, name="get_weather", description="The weather.", args_schema=Weather)


@check
def streamed_pieces_joined_equal_the_whole() -> None:
    pieces = list(model.stream(QUESTION, stream_usage=True))
    assert "".join(piece.content for piece in pieces) == model.invoke(QUESTION).content
    assert any(piece.usage_metadata for piece in pieces)


@check
def structured_output_is_parsed_by_each_method() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Person, method=method).invoke(QUESTION), Person), method
    raw = ChatOpenAI(**OPTIONS, max_tokens=400).with_structured_output(Person, include_raw=True).invoke(QUESTION)
    assert isinstance(raw["parsed"], Person) and raw["parsing_error"] is None


@check
def a_tool_call_goes_round_trip() -> None:
    bound = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False, strict=True)
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert_weather(call["args"])
    streamed: Any = None
    for piece in bound.stream(QUESTION):
        streamed = piece if streamed is None else streamed + piece
    assert [c["args"] for c in streamed.tool_calls] == [call["args"]]
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert model.bind_tools([get_weather], tool_choice="none").invoke([HumanMessage(QUESTION), answer, result]).content


@check
def an_agent_calls_a_tool_and_answers() -> None:
    forced = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False, strict=True)
    asked = itertools.count()
    steps = RunnableLambda(lambda messages: (model if next(asked) else forced).invoke(messages))

    class Once(ChatOpenAI):  # type: ignore[misc]
        def bind_tools(self, tools: Any, **options: Any) -> Any:
            return steps

    agent = create_agent(Once(**OPTIONS, max_tokens=200), tools=[get_weather])
    messages = agent.invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert "It is sunny" in messages[2].content and messages[3].content


@check
def a_fallback_answers_where_the_context_is_too_small() -> None:
    long = "word " * 5000
    overflow = raised(ContextOverflowError, lambda: model.invoke(long))
    assert isinstance(overflow, openai.BadRequestError)
    other = RunnableLambda(lambda _: "the answer of a larger model")
    chosen = model.with_fallbacks([other], exceptions_to_handle=(ContextOverflowError,))
    assert chosen.invoke(long) == "the answer of a larger model"
    raised(openai.BadRequestError, lambda: ChatOpenAI(**OPTIONS | {"temperature": 9}).invoke(QUESTION))


if __name__ == "__main__":
    run_checks()
