"""vLLM's sampling parameters at /v1/responses: each means what it means in a chat."""

from typing import Any

import pytest

from deployments.http.responses_api.schemas import ResponsesBody
from deployments.openai.dialog_fields import TemplateOptions
from deployments.openai.schemas import SamplingFields
from deployments.openai.validation import validate
from llama_core.errors import InvalidParameter
from llama_core.text.template.chat_template import TemplateChatFormat
from tests.support.scripted_engine import FakeEngine, FakeStream, ask

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEMPLATE = "{{ tone }}{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
EXTRAS: dict[str, Any] = {
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "seed": 3,
    "stop": ["x", "there"],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "user": "me",
    "priority": 9,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "min_p": 0.125,
    "logit_bias": {"5": -3, "7": 0.5},
    "stop_token_ids": [4, 9],
    "include_stop_str_in_output": True,
    "structured_outputs": {"json": SCHEMA},
    "chat_template_kwargs": {"tone": "Quiet. "},
    "enable_thinking": False,
}


def made() -> FakeEngine:
    engine = FakeEngine("Hello there, how are you?")
    engine.chat_format = TemplateChatFormat(engine.tokenizer, TEMPLATE)
    return engine


async def asked(engine: FakeEngine, path: str, body: dict[str, Any]) -> tuple[FakeStream, dict[str, Any]]:
    answer = await ask(engine, path, body)
    assert answer.status_code == 200, answer.text
    return engine.streams[-1], answer.json()


@pytest.mark.parametrize("name", EXTRAS)
async def test_a_response_is_generated_as_the_chat_with_the_same_field(name: str) -> None:
    asks: dict[str, Any] = {"seed": 1, name: EXTRAS[name]}
    engine = made()
    chat, answer = await asked(
        engine, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **asks}
    )
    response, written = await asked(engine, "/v1/responses", {"input": "Hi", **asks})
    plain, _ = await asked(engine, "/v1/responses", {"input": "Hi", "seed": 1})
    assert seen(response) == seen(chat) and engine.owners[0] == engine.owners[1]
    assert seen(response) != seen(plain) or engine.owners[1] != engine.owners[2]
    assert written["output"][0]["content"][0]["text"] == answer["choices"][0]["message"]["content"]


def seen(stream: FakeStream) -> tuple[object, ...]:
    return stream.prompt, stream.params, list(stream.stop), stream.skip_special_tokens, stream.shown_tokens


def test_every_shared_field_is_tested() -> None:
    assert EXTRAS.keys() == {*SamplingFields.model_fields, *TemplateOptions.model_fields}


@pytest.mark.parametrize(("name", "value"), [("top_k", "2"), ("min_p", True), ("logit_bias", {"a": 1}), ("stop", [""])])
def test_a_bad_value_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidParameter) as caught:
        validate(ResponsesBody, {"input": "Hi", name: value})
    assert caught.value.param == name


def test_structured_outputs_and_text_format_exclude_each_other() -> None:
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    both = {"input": "Hi", "structured_outputs": {"json": SCHEMA}, "text": text}
    with pytest.raises(InvalidParameter, match=r"structured_outputs: excludes text\.format"):
        validate(ResponsesBody, both)
    validate(ResponsesBody, both | {"text": {"format": {"type": "text"}}})
