"""pydantic-ai: system_prompt beside instructions, streams, tools, three forms of output, errors; by chat and by responses."""

import itertools
from typing import Annotated, Any

from pydantic import Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, Tool, ToolOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.programs.clients.checks import BASE_URL, MODEL, QUESTION, check, raised, run_checks
from tests.programs.clients.person import Person

provider = OpenAIProvider(base_url=BASE_URL, api_key="none")
chat = OpenAIChatModel(MODEL, provider=provider)
responses = OpenAIResponsesModel(MODEL, provider=provider)
Digit = Annotated[int, Field(ge=0, le=9)]
SETTINGS: Any = {"temperature": 0, "max_tokens": 300}
SHORT: Any = SETTINGS | {"max_tokens": 40}


def agent(model: Any, **options: Any) -> Any:
    return Agent(model, model_settings=SETTINGS, retries=0, **options)


@check
def a_system_prompt_beside_instructions_is_answered() -> None:
    for model in (chat, responses):
        asked = agent(model, system_prompt="You are brief.", instructions="Answer in one sentence.")
        result = asked.run_sync(QUESTION, model_settings=SHORT)
        assert result.output and result.usage.output_tokens > 0, model
        again = asked.run_sync("And 2 + 3?", message_history=result.all_messages(), model_settings=SHORT)
        assert again.output, model


@check
async def streamed_pieces_joined_equal_the_whole() -> None:
    for model in (chat, responses):
        whole = await agent(model).run(QUESTION, model_settings=SHORT)
        async with agent(model).run_stream(QUESTION, model_settings=SHORT) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        assert len(pieces) > 1 and "".join(pieces) == whole.output, model


@check
def an_output_of_each_form_is_a_model() -> None:
    for model, form in itertools.product((chat, responses), (ToolOutput, NativeOutput)):
        assert isinstance(agent(model, output_type=form(Person)).run_sync(QUESTION).output, Person), (model, form)


def required_once() -> Any:
    """Settings of a run whose first step calls a tool, and whose further steps answer."""
    choices = itertools.chain(["required"], itertools.repeat("none"))
    return lambda _: SETTINGS | {"tool_choice": next(choices)}


@check
def a_tool_is_called_and_its_result_is_answered() -> None:
    seen: list[int] = []

    def multiply(a: Digit, b: Digit) -> int:
        """The product of two numbers."""
        seen.append(a * b)
        return a * b

    for model in (chat, responses):
        seen.clear()
        asked = Agent(model, tools=[Tool(multiply)], model_settings=required_once(), retries=0)
        result = asked.run_sync(QUESTION)
        assert seen and result.output, model
        kinds = [part.part_kind for message in result.all_messages() for part in message.parts]
        assert "tool-call" in kinds and "tool-return" in kinds, kinds


@check
def errors_have_their_status() -> None:
    long = "word " * 5000
    raised(ModelContextWindowExceededError, lambda: agent(chat).run_sync(long))
    wrong = {"temperature": 9}
    assert raised(ModelHTTPError, lambda: agent(chat).run_sync(QUESTION, model_settings=wrong)).status_code == 400
    missing = OpenAIChatModel("none", provider=provider)
    assert raised(ModelHTTPError, lambda: agent(missing).run_sync(QUESTION)).status_code == 404


if __name__ == "__main__":
    run_checks()
