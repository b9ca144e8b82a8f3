"""instructor over the openai package: models from tools, JSON and schemas, several calls, streams."""

from typing import Any

import instructor
import openai
from pydantic import BaseModel, Field

from tests.programs.clients.checks import BASE_URL, MODEL, QUESTION, check, run_checks
from tests.programs.clients.person import Person

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 300, "temperature": 0}


class People(BaseModel):
    people: list[Person] = Field(min_length=1, max_length=2)


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key="none"), mode=mode).chat.completions


@check
def a_model_comes_from_tools_strict_tools_and_a_schema() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        assert isinstance(client(mode).create(**ASK, response_model=Person, max_retries=0), Person), mode


@check
def nested_models_are_complete() -> None:
    people = client(instructor.Mode.JSON_SCHEMA).create(**ASK, response_model=People, max_retries=0)
    assert 1 <= len(people.people) <= 2


@check
def a_partial_model_grows_to_the_whole() -> None:
    parts = list(client(instructor.Mode.TOOLS).create_partial(**ASK, response_model=Person, max_retries=0))
    assert len(parts) > 1
    Person.model_validate(parts[-1].model_dump())


if __name__ == "__main__":
    run_checks()
