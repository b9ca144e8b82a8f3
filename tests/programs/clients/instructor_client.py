"""instructor over the openai package: models from tools, JSON and schemas, several calls, streams."""

from typing import Any

import instructor
import openai
from pydantic import BaseModel, Field

from tests.programs.clients.checks import BASE_URL, MODEL, QUESTION, check, run_checks

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 300, "temperature": 0}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


class People(BaseModel):
    people: list[Person] = Field(min_length=1, max_length=2)


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key="none"), mode=mode)


def answered(mode: instructor.Mode) -> None:
    person = client(mode).chat.completions.create(**ASK, response_model=Person, max_retries=0)
    assert isinstance(person, Person)
    assert 0 <= person.age <= 150


@check
def a_model_comes_from_a_tool_call() -> None:
    answered(instructor.Mode.TOOLS)


@check
def a_model_comes_from_a_strict_tool_call() -> None:
    answered(instructor.Mode.TOOLS_STRICT)


@check
def a_model_comes_from_a_json_schema() -> None:
    answered(instructor.Mode.JSON_SCHEMA)


@check
def nested_models_are_complete() -> None:
    people = client(instructor.Mode.JSON_SCHEMA).chat.completions.create(**ASK, response_model=People, max_retries=0)
    assert 1 <= len(people.people) <= 2


@check
def a_partial_model_grows_to_the_whole() -> None:
    chat = client(instructor.Mode.TOOLS).chat.completions
    parts = list(chat.create_partial(**ASK, response_model=Person, max_retries=0))
    assert len(parts) > 1
    Person.model_validate(parts[-1].model_dump())


@check
async def the_asynchronous_client_answers_with_the_raw_completion() -> None:
    other: Any = instructor.from_openai(
        openai.AsyncOpenAI(base_url=BASE_URL, api_key="none"), mode=instructor.Mode.TOOLS
    )
    person, raw = await other.chat.completions.create_with_completion(**ASK, response_model=Person, max_retries=0)
    assert isinstance(person, Person)
    assert raw.choices[0].finish_reason == "tool_calls" and raw.usage.completion_tokens > 0


if __name__ == "__main__":
    run_checks()
