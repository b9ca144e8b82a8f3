"""What one body can cost: every list and dictionary of every route is bounded or ends at its first fault, and what is long runs
in a thread."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from deployments.http.app import build_http_app
from deployments.http.request_body import INLINE_BYTES, INLINE_OBJECTS, BodyLimits, BodyReader, parse_json
from deployments.observe.metrics import Metrics
from deployments.openai import prompt_encoder
from deployments.openai.schemas import ChatBody
from deployments.openai.structured_outputs import grammar_of
from deployments.openai.validation import validate
from llama_core.errors import InvalidDialog, InvalidParameter
from llama_core.text.tools.plain_dialog import plain_dialog
from tests.deployments.http.test_adapter_routes import Loader
from tests.support.scripted_engine import FakeEngine, ask, assert_error

MOST_ERRORS = 300  # that pydantic makes of one field, an object each
MANY = 20_000
SKIPPED = (
    "metadata",
    "serialization",
    "definitions",
    "json_schema_input_schema",
)  # of pydantic's schema: they validate nothing
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "hi"}]


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """The parts of pydantic's schema that validate, each once."""
    definitions: dict[str, Any] = {}
    unread, seen = [schema], set[int]()
    while unread:
        part = unread.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            if isinstance(part.get("type"), str):
                yield part
            definitions |= {each["ref"]: each for each in part.get("definitions", ())}
            unread += [definitions[part["schema_ref"]]] if part.get("type") == "definition-ref" else []
            unread += [each for name, each in part.items() if name not in SKIPPED]
        elif isinstance(part, list | tuple):
            unread += part


def bodies() -> set[type[BaseModel]]:
    app = build_http_app(FakeEngine(), Metrics(in_ray=False), loader=Loader())
    return {route.body for route in app.routes if route.body is not None}


def models() -> list[type[BaseModel]]:
    """The bodies of all routes, and the objects in them."""
    found = {
        part["cls"] for body in bodies() for part in parts(body.__pydantic_core_schema__) if part["type"] == "model"
    }
    return sorted(found, key=lambda model: model.__qualname__)


def test_every_list_and_dictionary_is_bounded_or_ends_at_its_first_fault() -> None:
    assert len(bodies()) == 12 and len(models()) > 30
    for model in models():
        for part in parts(model.__pydantic_core_schema__):
            if part["type"] in ("list", "set", "frozenset", "tuple", "generator"):
                assert part.get("fail_fast") or part.get("max_length"), (model, part)
            if part["type"] == "dict":  # of any number of entries, of which none can be at fault
                assert part.get("values_schema", {"type": "any"})["type"] == "any", (model, part)


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_many_bad_values_make_few_errors(model: type[BaseModel]) -> None:
    items: list[Any] = [1, None, "a", {}, [[]], {"type": "text"}, {"role": "user"}]
    many: list[Any] = [[item] * MANY for item in items]
    many += [{str(index): item for index in range(MANY)} for item in items[:4]]
    for name, field in model.model_fields.items():
        for value in many:
            error = errors_of(model, {field.alias or name: value})
            assert error is None or error.error_count() < MOST_ERRORS, (name, str(value)[:20])


def errors_of(model: type[BaseModel], given: dict[str, Any]) -> ValidationError | None:
    try:
        model.model_validate(given)
    except ValidationError as error:
        return error
    return None


def calls(num_messages: int, arguments: str) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*QUESTION, *[{"role": "assistant", "tool_calls": [call]}] * num_messages]}


def parsed(body: dict[str, Any]) -> ChatBody:
    return validate(ChatBody, parse_json(json.dumps(body).encode()))


def test_arguments_of_calls_have_the_bodys_one_budget() -> None:
    edit = {"path": "a.py", "edits": [{"line": line, "text": "a line\n" * 20} for line in range(20)]}
    assert len(parsed(calls(400, json.dumps(edit))).messages) == 401, "an agent's history of 1.3 MB"
    lists = "[" + "[]," * 50_000 + "[]]"
    parsed(calls(1, lists))
    with pytest.raises(InvalidDialog, match=r"messages\[\d\].tool_calls\[0\].function.arguments: more than"):
        parsed(calls(15, lists))
    parsed(calls(1, lists))


@pytest.mark.parametrize("kind", ["structural_tag", "json"])
async def test_json_in_the_text_of_a_grammar_is_bounded_before_it_is_parsed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "hi", "structured_outputs": {kind: "[" + "[]," * 100_000 + "[]]"}}
    monkeypatch.setattr("deployments.openai.structured_outputs.json", None)
    error = assert_error(await ask(FakeEngine(), COMPLETIONS, body), 400, "invalid_parameter")
    assert error["message"] == f"structured_outputs.{kind}: must have at most {3 * 2**16} bytes"


@pytest.mark.parametrize(("num_objects", "is_inline"), [(INLINE_OBJECTS, True), (INLINE_OBJECTS + 1, False)])
async def test_a_small_body_of_many_objects_is_checked_in_a_thread(
    num_objects: int, is_inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr("deployments.http.request_body.parse_json", lambda raw: threads.append(threading.get_ident()))
    monkeypatch.setattr("deployments.http.request_body.validate", lambda kind, value: None)
    raw = json.dumps({"messages": QUESTION * (num_objects - 1)}).encode()
    assert len(raw) < INLINE_BYTES
    await BodyReader(BodyLimits()).parse(raw, ChatBody)
    assert (threads == [threading.get_ident()]) == is_inline


async def test_many_calls_and_long_lists_of_ids_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def recorded(function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*arguments)

        return run

    monkeypatch.setattr(prompt_encoder, "plain_dialog", recorded(plain_dialog))
    monkeypatch.setattr(prompt_encoder.PromptEncoder, "_check_ids", recorded(prompt_encoder.PromptEncoder._check_ids))
    engine = FakeEngine()
    engine.max_seq_len, engine.max_request_tokens = 2**17, 2**20
    for num_calls, num_ids, is_inline in ((10, 1000, True), (200, 10_000, False)):
        threads.clear()
        await ask(engine, CHAT, calls(num_calls, json.dumps({"text": "a" * 50})) | {"max_tokens": 2})
        await ask(engine, COMPLETIONS, {"prompt": [5] * num_ids, "max_tokens": 2})
        assert len(threads) == 2
        assert [thread == threading.get_ident() for thread in threads] == [is_inline] * 2


def test_thinking_parts_are_read_once_each() -> None:
    class Part(dict[str, str]):
        def __eq__(self, other: object) -> bool:
            raise AssertionError("parts are compared with one another")

    content = [Part(type="thinking", thinking=str(number)) for number in range(3)]
    message = {"role": "assistant", "content": [*content, Part(type="text", text="Yes.")]}
    body = validate(ChatBody, {"messages": [*QUESTION, message]})
    assert body.messages[-1].reasoning_text == "0\n1\n2" and body.messages[-1].content == "Yes."


def test_all_structures_of_a_tag_together_are_read_in_a_bounded_time() -> None:
    """On the event loop."""
    names: dict[str, Any] = {str(i): {} for i in range(50)}
    references = [{"$ref": "#/$defs/a", "properties": {}}] * 25
    schema = {"properties": {"z": {"prefixItems": references}}, "$defs": {"a": {"properties": names}}}
    structures = [{"begin": "<a>", "schema": schema, "end": "</a>"}] * 120
    tag = {"type": "structural_tag", "triggers": ["<a"], "structures": structures}
    begin_s = time.thread_time()
    assert grammar_of(validate(ChatBody, {"messages": QUESTION, "response_format": tag}))[0]
    assert time.thread_time() - begin_s < 2
    tag["structures"] = [*structures, {"begin": "<a>", "end": "a" * 200_000}]
    with pytest.raises(InvalidParameter, match="at most"):
        grammar_of(validate(ChatBody, {"messages": QUESTION, "response_format": tag}))
