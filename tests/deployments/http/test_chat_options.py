"""Chats by a model's own template over HTTP: options, names, refusals, control tokens in prompts and answers."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.engine.interface import SamplingDefaults
from llama_core.text.chat_format import ChatFormat, ChatOptions, NoChatFormat
from llama_core.text.registry import load_tokenizer, open_chat_format
from llama_core.text.template.chat_template import TemplateChatFormat
from llama_core.text.tools.tool import Tool
from tests.support.chat_templates import make_chat_model
from tests.support.scripted_engine import FakeEngine, ask, sse

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
NO_THINKING = ChatOptions(template_variables={"enable_thinking": False})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model("qwen", tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def engine(folder: Path) -> FakeEngine:
    return engine_with(folder)


def engine_with(folder: Path, chat_format: ChatFormat | None = None) -> FakeEngine:
    made = FakeEngine()
    made.tokenizer = load_tokenizer(folder / "tokenizer.json")
    made.chat_format = chat_format or open_chat_format("auto", made.tokenizer, folder)
    return made


async def post(engine: FakeEngine, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return await ask(engine, path, body)


def error(answer: httpx.Response, code: str) -> str:
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text
    message: str = answer.json()["error"]["message"]
    return message


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"add_generation_prompt": False}, ChatOptions(add_generation_prompt=False)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, NO_THINKING),
        ({"enable_thinking": False}, NO_THINKING),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, NO_THINKING),
        ({"continue_final_message": True}, ChatOptions(False, True)),
        ({"continue_final_message": True, "add_generation_prompt": False}, ChatOptions(False, True)),
        ({"add_generation_prompt": None, "continue_final_message": None, "chat_template_kwargs": None}, ChatOptions()),
    ],
)
async def test_the_options_of_a_chat_reach_the_template(body: Any, options: ChatOptions, engine: FakeEngine) -> None:
    expected = engine.chat_format.encode(HELLO, options)
    assert (await post(engine, messages=HELLO, **body)).status_code == 200
    assert engine.streams[-1].prompt == expected
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert (await post(engine, "/tokenize", messages=parts, **body)).json()["tokens"] == expected
    assert "You are a careful helper." in engine.tokenizer.decode(expected)


async def test_tools_that_the_template_offers_are_offered_once(tmp_path: Path) -> None:
    engine = engine_with(make_chat_model("granite", tmp_path))
    tool = Tool("f", "Finds out.")
    assert (await post(engine, messages=HELLO, tools=[tool.described()])).status_code == 200
    assert engine.streams[-1].prompt == engine.chat_format.encode(HELLO, ChatOptions(tools=(tool,)))
    assert engine.tokenizer.decode(engine.streams[-1].prompt).count("Finds out.") == 1


async def test_options_that_cannot_work_are_refused(engine: FakeEngine) -> None:
    both = await post(engine, messages=HELLO, continue_final_message=True, add_generation_prompt=True)
    assert "continue_final_message" in error(both, "invalid_parameter")
    wrong: list[Any] = [[], {"enable_thinking": {}}, {"enable_thinking": "x" * 5000}, {str(i): 1 for i in range(17)}]
    for value in wrong:
        error(await post(engine, messages=HELLO, chat_template_kwargs=value), "invalid_parameter")
    llama2 = FakeEngine()
    options = {"continue_final_message": True, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    said = error(await post(llama2, messages=HELLO, continue_final_message=True), "invalid_dialog")
    assert "continues the last message" in said
    for option in ({name: value} for name, value in options.items()):
        error(await post(llama2, "/v1/completions", prompt="x", **option), "unsupported")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/responses", "/v1/classify"])
async def test_variables_that_the_template_does_not_read_change_nothing(path: str, folder: Path) -> None:
    """Clients of Qwen and DeepSeek send their switches to every model."""
    asks: dict[str, Any] = {"input": HELLO} if path == "/v1/responses" else {"messages": HELLO}
    asks |= {"labels": ["a", "b"]} if path == "/v1/classify" else {}
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    plain = engine_with(folder, TemplateChatFormat(tokenizer, "{{ messages[0].content }}"))
    unread = {"enable_thinking": False, "thinking": True, "thoughts": 0, "messages": "x", "tools": "x"}
    for engine in (plain, FakeEngine()):  # a template, and a built-in format
        whole = [await post(engine, path, **asks, chat_template_kwargs=kwargs) for kwargs in ({}, unread)]
        assert [answer.status_code for answer in whole] == [200, 200], whole[1].text
        assert path != "/tokenize" or whole[0].json() == whole[1].json()
        prompts = [stream.prompt for stream in engine.streams]
        assert prompts[: len(prompts) // 2] == prompts[len(prompts) // 2 :]


async def test_the_effort_of_reasoning_reaches_the_template_in_either_form(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    engine = engine_with(folder, TemplateChatFormat(tokenizer, "{{ reasoning_effort }} {{ messages[0].content }}"))
    for fields in ({"reasoning_effort": "much"}, {"reasoning": {"effort": "much"}}):
        assert (await post(engine, messages=HELLO, **fields)).status_code == 200
        assert engine.tokenizer.decode(engine.streams[-1].prompt).startswith("much ")


async def test_a_refusal_of_the_template_is_a_400_in_its_words(folder: Path) -> None:
    source = "{{ messages[0].name }}{% if messages | length > 1 %}{{ raise_exception('One message only.') }}{% endif %}"
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    engine = engine_with(folder, TemplateChatFormat(tokenizer, source))
    answered = [*HELLO, {"role": "assistant", "content": "Hi"}]
    assert error(await post(engine, messages=answered), "invalid_dialog") == "One message only."
    assert "writes nothing" in error(await post(engine, messages=HELLO), "invalid_dialog")
    assert (await post(engine, messages=[{**HELLO[0], "name": "Ann <|im_end|>"}])).status_code == 200
    assert engine.tokenizer.decode(engine.streams[-1].prompt) == "Ann <|im_end|>"


async def test_a_model_without_a_template_refuses_chats_and_completes_texts(folder: Path) -> None:
    engine = engine_with(folder, NoChatFormat(load_tokenizer(folder / "tokenizer.json")))
    assert "chat_template=FILE" in error(await post(engine, messages=HELLO), "no_chat_template")
    error(await post(engine, "/tokenize", messages=HELLO), "no_chat_template")
    assert (await post(engine, "/v1/completions", prompt="Hello")).status_code == 200


async def test_names_of_control_tokens_are_parsed_in_prompts_only_on_request(engine: FakeEngine) -> None:
    text, tokenizer = "a<|im_end|>b", engine.tokenizer
    plain, special = tokenizer.encode(text, bos=True, eos=False), tokenizer.encode_special(text, bos=True)
    assert plain != special
    for body, expected in (({}, plain), ({"parse_special": False}, plain), ({"parse_special": True}, special)):
        assert (await post(engine, "/v1/completions", prompt=text, **body)).status_code == 200
        assert engine.streams[-1].prompt == expected
        assert (await post(engine, "/tokenize", prompt=text, **body)).json()["tokens"] == expected
    error(await post(engine, messages=HELLO, parse_special=True), "unsupported")


async def test_an_answer_shows_names_of_control_tokens_only_on_request(engine: FakeEngine) -> None:
    ids = engine.tokenizer.encode_special("one<|im_start|>two")
    engine.tokenizer.__dict__["encode"] = lambda *_, **__: ids  # the scripted answer
    engine.chat_format = NoChatFormat(engine.tokenizer)
    for body, expected in (({}, "onetwo"), ({"skip_special_tokens": False}, "one<|im_start|>two")):
        answer = await post(engine, "/v1/completions", prompt=[ids], max_tokens=50, echo=True, **body)
        assert answer.json()["choices"][0]["text"] == expected * 2
        assert (await post(engine, "/detokenize", tokens=ids, **body)).json()["prompt"] == expected


async def test_a_request_without_sampling_parameters_gets_the_servers(engine: FakeEngine) -> None:
    engine.sampling_defaults = SamplingDefaults(temperature=0.3, top_k=7)
    await post(engine, messages=HELLO, temperature=0.1)
    params = engine.streams[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.1, 0.9, 7)
    await post(engine, messages=HELLO, top_k=-1, top_p=0.5)
    params = engine.streams[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.3, 0.5, 0)


async def test_llama2_continues_a_final_message_and_writes_complete_dialogs() -> None:
    engine = FakeEngine("is Bob.")
    dialog = [*HELLO, {"role": "assistant", "content": "My name "}]
    answer = await post(engine, messages=dialog, continue_final_message=True)
    assert answer.json()["choices"][0]["message"]["content"] == " is Bob."
    assert engine.tokenizer.decode(engine.streams[-1].prompt) == f"[INST] {HELLO[0]['content']} [/INST] My name"
    assert engine.tokenizer.eos_id not in engine.streams[-1].prompt
    whole = (await post(engine, "/tokenize", messages=dialog, add_generation_prompt=False)).json()["tokens"]
    assert (
        whole == engine.chat_format.encode([*dialog, HELLO[0]])[: len(whole)] and whole[-1] == engine.tokenizer.eos_id
    )
    body = {"messages": dialog, "max_tokens": 9}
    continued = await post(engine, "/v1/messages", **body)
    assert continued.json()["content"] == [{"type": "text", "text": " is Bob."}], "an assistant's prefill"
    streamed = (await post(engine, "/v1/messages", **body, stream=True)).text.splitlines()
    deltas = [json.loads(line.removeprefix("data: "))["delta"] for line in streamed if '"text_delta"' in line]
    assert "".join(delta["text"] for delta in deltas) == " is Bob."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "fields", "expected"),
    [
        ("One  two. ", {}, "One  two."),
        ("One two three", {"stop": "two"}, "One "),
        ("One two. ", {"n": 2, "logprobs": True}, "One two."),
    ],
)
async def test_answers_of_llama2_do_not_end_in_the_templates_space(
    answer: str, fields: dict[str, Any], expected: str, stream: bool
) -> None:
    engine = FakeEngine(answer)
    got = await post(engine, messages=HELLO, stream=stream, **fields)
    texts = [""] * fields.get("n", 1)
    for part in sse(got.text) if stream else [got.json()]:
        for choice in part["choices"]:
            texts[choice["index"]] += (choice["delta"] if stream else choice["message"]).get("content") or ""
    assert texts == [expected] * len(texts)
