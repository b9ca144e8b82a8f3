"""Ordinary grammars are checked in a thread, others in a process, for which no ordinary one waits."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.http import grammar_checks
from deployments.http.grammar_checks import GrammarChecks
from deployments.http.limits import HttpLimits
from deployments.http.prompt_encoder import PromptEncoder
from llama_core.errors import InvalidParameter, NotReady, QueueFull
from llama_core.text import check_process
from llama_core.text.grammar import IN_FULL, TOO_LARGE, TakesLong, json_schema_grammar
from llama_core.text.tools.tool import Tool, ToolUse
from tests.support.scripted_engine import FakeEngine


def schema(name: str, number: int) -> str:
    """With 1000 properties it is too large, which takes 0.2 s of processor time to find out."""
    properties = {f"{name}_{i}": {"type": "integer"} for i in range(number)}
    return json_schema_grammar({"type": "object", "properties": properties, "additionalProperties": False})


@pytest.fixture
def encoder() -> Iterator[PromptEncoder]:
    encoder = PromptEncoder(FakeEngine(), HttpLimits().text)
    yield encoder
    encoder._checks._process._process.end()


def pid(encoder: PromptEncoder) -> int | None:
    return encoder._checks._process.pid


async def refused(encoder: PromptEncoder, grammar: str) -> str:
    with pytest.raises(InvalidParameter) as found:
        await encoder.grammar(grammar, "guided_json")
    assert found.value.param == "guided_json"
    return found.value.message


async def test_ordinary_grammars_start_no_process(encoder: PromptEncoder) -> None:
    for number in range(1, 9):
        assert await encoder.grammar(schema("ordinary", number), "guided_json")
    assert pid(encoder) is None


async def test_what_the_process_found_is_kept(encoder: PromptEncoder) -> None:
    message = await refused(encoder, schema("kept", 1000))
    process = pid(encoder)
    assert message == f"guided_json: {TOO_LARGE}" and process is not None
    os.kill(process, signal.SIGSTOP)
    assert await asyncio.wait_for(refused(encoder, schema("kept", 1000)), 20) == message
    assert pid(encoder) == process


async def test_the_process_accepts_what_the_thread_accepts(encoder: PromptEncoder) -> None:
    grammar = schema("accepted", 200)
    assert await encoder.checked_grammar(grammar, "guided_json", is_whole=True) == IN_FULL.checked_grammar(
        grammar, "guided_json"
    )
    assert pid(encoder) is not None


async def test_no_ordinary_grammar_waits_for_one_that_takes_long(encoder: PromptEncoder) -> None:
    """Whatever the number of those: one thread waits for the process."""
    await refused(encoder, schema("first", 1000))
    process = pid(encoder)
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    slow = [asyncio.ensure_future(refused(encoder, schema(f"slow_{i}", 1000))) for i in range(3)]
    for number in range(1, 9):
        assert await asyncio.wait_for(encoder.grammar(schema("quick", number), "guided_json"), 20)
    assert not any(each.done() for each in slow)
    os.kill(process, signal.SIGCONT)
    assert await asyncio.gather(*slow) == [f"guided_json: {TOO_LARGE}"] * 3
    assert pid(encoder) == process


async def test_a_check_that_does_not_end_is_the_servers_fault_and_is_not_kept(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = schema("unfinished", 200)
    with monkeypatch.context() as patch:
        patch.setattr(check_process, "_LONGEST_S", 0.0)
        with pytest.raises(NotReady, match="guided_json: the check of the grammar has not ended"):
            await encoder.grammar(grammar, "guided_json")
    assert pid(encoder) is None
    assert await encoder.grammar(grammar, "guided_json")


async def test_checks_that_take_long_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "_MAX_CHARS", 10)
    monkeypatch.setattr(grammar_checks, "_LEAST_CHARS", 8)
    checks, release = GrammarChecks(), threading.Event()

    async def never(_: Any) -> str:
        raise TakesLong

    def slow(_: Any) -> str:
        release.wait(20)
        return "grammar"

    first = asyncio.ensure_future(checks.run(slow, 1, "field", never))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await checks.run(slow, 1, "field", never)
    release.set()
    assert await first == "grammar"


async def test_a_tool_whose_grammar_takes_too_much_memory_is_refused(encoder: PromptEncoder) -> None:
    """Rank 0 would need gigabytes."""
    for multiple, is_refused in ((100, False), (1009, False), (99_999_989, True)):
        schema = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": multiple}}}
        use = ToolUse((Tool("other"), Tool("count", schema=json.dumps(schema))), "required")
        made = encoder.tool_grammar(use, "", "", begun=False)
        if not is_refused:
            assert str(multiple) in await made
            assert (pid(encoder) is None) == (multiple == 100)
            continue
        with pytest.raises(InvalidParameter) as refused:
            await made
        assert refused.value.message == f"tools[1].function.parameters: {TOO_LARGE}"


async def test_tools_that_take_too_much_memory_together_are_refused(encoder: PromptEncoder) -> None:
    """Each alone is within the limits."""
    multiples = [250_007, 250_013, 250_027, 250_031]
    tools = tuple(
        Tool(f"count_{multiple}", schema=json.dumps({"type": "integer", "multipleOf": multiple}))
        for multiple in multiples
    )
    assert await encoder.tool_grammar(ToolUse(tools[:1], "required"), "", "", begun=False)
    with pytest.raises(InvalidParameter) as refused:
        await encoder.tool_grammar(ToolUse(tools, "required"), "", "", begun=False)
    assert refused.value.message == f"tools: {TOO_LARGE}"
