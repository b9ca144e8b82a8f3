"""null means absent in every object of the bodies of Anthropic's messages and OpenAI's responses."""

from types import ModuleType
from typing import Any

import pytest
from pydantic import TypeAdapter

from deployments.http.field_types import Body
from deployments.http.messages_api import content as of_messages
from deployments.http.messages_api.schemas import CountTokensBody, MessagesBody
from deployments.http.responses_api import content as of_responses
from deployments.http.responses_api.schemas import ResponsesBody
from deployments.http.validation import validate

HELLO = [{"role": "user", "content": "Hello"}]
# What an object comes in, and an object with the fields that are required.
OBJECTS: list[tuple[Any, dict[str, Any]]] = [
    (of_messages.InputMessages, {"role": "user", "content": "x"}),
    (of_messages.Block, {"type": "text", "text": "x"}),
    (of_messages.Block, {"type": "tool_use", "id": "a", "name": "b", "input": {}}),
    (of_messages.Block, {"type": "tool_result", "tool_use_id": "a"}),
    (of_messages.Block, {"type": "thinking", "thinking": "x"}),
    (of_messages.Block, {"type": "redacted_thinking"}),
    (of_messages.InputTools, {"name": "a", "input_schema": {}}),
    (of_messages.ToolChoice, {"type": "auto"}),
    (of_messages.Metadata, {}),
    (of_messages.Thinking, {"type": "enabled"}),
    (of_messages.OutputFormat, {"type": "json_schema", "schema": {}}),
    (of_messages.OutputConfig, {}),
    (of_responses.Items, {"type": "message", "role": "user", "content": "x"}),
    (of_responses.Items, {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"}),
    (of_responses.Items, {"type": "function_call_output", "call_id": "a", "output": "x"}),
    (of_responses.Items, {"type": "reasoning"}),
    (of_responses.Tools, {"type": "function", "name": "a"}),
    (of_responses.FunctionTool, {"type": "function", "name": "a"}),
    (of_responses.TextFormat, {"type": "text"}),
    (of_responses.TextConfig, {}),
    (of_responses.Reasoning, {}),
]
ARE_LISTS = (of_messages.InputMessages, of_messages.InputTools, of_responses.Items, of_responses.Tools)


def read(kind: Any, given: dict[str, Any]) -> Body:
    read: Any = TypeAdapter(kind).validate_python([given] if kind in ARE_LISTS else given)
    found: Body = read[0] if isinstance(read, list) else read
    return found


@pytest.mark.parametrize(("kind", "required"), OBJECTS)
def test_null_means_absent_in_every_field_of_an_object(kind: Any, required: dict[str, Any]) -> None:
    absent = read(kind, required)
    for name, field in type(absent).model_fields.items():
        if field.is_required() or name in required:
            continue
        assert read(kind, {**required, field.alias or name: None}).model_dump() == absent.model_dump(), name


def test_no_object_of_the_bodies_is_left_out() -> None:
    tested = {type(read(kind, required)) for kind, required in OBJECTS}
    assert tested == set(models_of(of_messages)) | set(models_of(of_responses))


def models_of(module: ModuleType) -> list[type[Body]]:
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    return [each for each in classes if issubclass(each, Body)]


@pytest.mark.parametrize(
    ("kind", "required"),
    [
        (MessagesBody, {"messages": HELLO, "max_tokens": 5}),
        (CountTokensBody, {"messages": HELLO}),
        (ResponsesBody, {"input": "Hello"}),
    ],
)
def test_null_means_absent_in_every_field_of_a_body(kind: Any, required: dict[str, Any]) -> None:
    optional = {name: None for name in {**kind.model_fields, **kind.neutral} if name not in required}
    assert validate(kind, required | optional).model_dump() == validate(kind, required).model_dump()
