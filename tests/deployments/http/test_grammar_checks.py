"""Ordinary grammars are checked in a thread, others in a process, for which no ordinary one waits."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from llguidance import LLMatcher

from deployments.http import grammar_checks
from deployments.http.grammar_checks import GrammarChecks
from deployments.http.limits import HttpLimits
from deployments.http.prompt_encoder import PromptEncoder
from llama_core.errors import InvalidParameter, NotReady, QueueFull
from llama_core.text import check_process
from llama_core.text.grammar import IN_FULL, TOO_LARGE, TakesLong, json_schema_grammar
from llama_core.text.tools.tool import Tool, ToolUse
from tests.support.scripted_engine import FakeEngine
from tests.support.waiting import until_true


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


async def until_waiting(checks: GrammarChecks, number: int) -> None:
    """Until as many checks wait behind the one that runs."""
    waiting = checks._limiter._waiting
    await until_true(f"{number} checks wait", lambda: sum(map(len, waiting.values())) == number, pause_s=0.005)


async def test_ordinary_grammars_start_no_process(encoder: PromptEncoder) -> None:
    for number in range(1, 9):
        assert await encoder.grammar(schema("ordinary", number), "guided_json")
    assert pid(encoder) is None


async def test_what_the_process_found_is_kept(encoder: PromptEncoder) -> None:
    message = await refused(encoder, schema("kept", 1000))
    process = pid(encoder)
    assert message == f"guided_json: {TOO_LARGE}" and process is not None
    os.kill(process, signal.SIGSTOP)
    assert await refused(encoder, schema("kept", 1000)) == message
    assert pid(encoder) == process


async def test_an_owner_finds_out_nothing_by_what_was_checked_for_another(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_compiled, validate = 0, LLMatcher.validate_grammar

    def counted(*args: Any, **kwargs: Any) -> str:
        nonlocal num_compiled
        num_compiled += 1
        return str(validate(*args, **kwargs))

    monkeypatch.setattr(LLMatcher, "validate_grammar", counted)
    use = ToolUse((Tool("scoped", schema='{"type": "object", "properties": {"scoped": {"type": "string"}}}'),))

    async def compiles(owner: str) -> tuple[int, int]:
        own, before = encoder.of(owner), num_compiled
        await own.grammar(schema("scoped", 3), "guided_json")
        of_schema = num_compiled - before
        await own.tool_grammar(use, "", "", begun=False)
        return of_schema, num_compiled - before - of_schema

    first = await compiles("key a")
    assert min(first) > 0 and await compiles("key a") == (0, 0)
    assert await compiles("key b") == first, "the time of an answer would tell what key a has sent"


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
        assert await encoder.grammar(schema("quick", number), "guided_json")
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
        release.wait(120)
        return "grammar"

    first = asyncio.ensure_future(checks.run(slow, "grammar", "field", never))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await checks.run(slow, "grammar", "field", never)
    release.set()
    assert await first == "grammar"


async def test_a_check_ends_with_the_drain(encoder: PromptEncoder) -> None:
    """A request that waits would be refused behind its check."""
    await refused(encoder, schema("before the drain", 1000))
    process = pid(encoder)
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    waiting = [
        asyncio.ensure_future(encoder.grammar(schema(f"drained_{i}", 1000), "guided_json", is_whole=True))
        for i in range(3)
    ]
    await until_waiting(encoder._checks, 2)
    for end in encoder._engine.drain_ends:  # type: ignore[attr-defined]
        end()
    for found in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(found, NotReady) and "shutting down" in found.message
    assert pid(encoder) is None
    with pytest.raises(NotReady):
        await encoder.grammar(schema("behind the drain", 1000), "guided_json")
    assert pid(encoder) is None


async def test_owners_take_turns(encoder: PromptEncoder) -> None:
    """Behind twenty slow grammars of one owner, another one's is the next."""
    order: list[str] = []

    async def check(owner: str, grammar: str) -> None:
        with pytest.raises(InvalidParameter):
            await encoder.of(owner).grammar(grammar, "guided_json")
        order.append(owner)

    await refused(encoder, schema("before the turns", 1000))
    process = pid(encoder)
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    first = [asyncio.ensure_future(check("many", schema(f"many_{i}", 1000))) for i in range(8)]
    await until_waiting(encoder._checks, 7)
    other = asyncio.ensure_future(check("one", schema("one", 1000)))
    await until_waiting(encoder._checks, 8)
    os.kill(process, signal.SIGCONT)
    await asyncio.gather(*first, other)
    assert order.index("one") == 1


async def test_a_large_grammar_does_not_wait_for_all_multiples_of_the_same_owner() -> None:
    checks, release, order = GrammarChecks(), threading.Event(), list[str]()

    async def never(_: Any) -> str:
        raise TakesLong

    def slow(_: Any, name: str) -> str:
        release.wait(120)
        order.append(name)
        return name

    multiple = json_schema_grammar({"type": "integer", "multipleOf": 250_007})
    grammars = {**{f"multiple {i}": multiple for i in range(5)}, "large": schema("large", 1000)}
    running = [
        asyncio.ensure_future(checks.run(partial(slow, name=name), grammar, "field", never))
        for name, grammar in grammars.items()
    ]
    await until_waiting(checks, 5)
    release.set()
    await asyncio.gather(*running)
    assert order.index("large") == 1


async def test_one_owner_leaves_a_place_to_others() -> None:
    checks, release = GrammarChecks(), threading.Event()

    async def never(_: Any) -> str:
        raise TakesLong

    def slow(_: Any) -> str:
        release.wait(120)
        return "grammar"

    def run(owner: str) -> "asyncio.Future[str]":
        return asyncio.ensure_future(checks.run(slow, "grammar", "field", never, owner))

    many = [run("many") for _ in range(64)]
    await until_waiting(checks, 51)
    other = run("one")
    await until_waiting(checks, 52)
    release.set()
    found = await asyncio.gather(*many, other, return_exceptions=True)
    assert found.count("grammar") == 53 and sum(isinstance(each, QueueFull) for each in found) == 12


async def test_a_request_that_ends_leaves_the_queue() -> None:
    checks, release = GrammarChecks(), threading.Event()

    async def never(_: Any) -> str:
        raise TakesLong

    def slow(_: Any) -> str:
        release.wait(120)
        return "grammar"

    running = [asyncio.ensure_future(checks.run(slow, "grammar", "field", never, "owner")) for _ in range(3)]
    await until_waiting(checks, 2)
    for each in running[:2]:  # one runs, one waits
        each.cancel()
    await until_waiting(checks, 1)
    assert not running[2].done() and sum(checks._limiter._weights.values()) == 2 * grammar_checks._LEAST_CHARS
    release.set()
    assert await running[2] == "grammar"
    await until_true("no check counts", lambda: not checks._limiter._weights and not checks._limiter._waiting)


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
    multiples = [100_003, 100_019, 100_043, 100_049]
    tools = tuple(
        Tool(f"count_{multiple}", schema=json.dumps({"type": "integer", "multipleOf": multiple}))
        for multiple in multiples
    )
    assert await encoder.tool_grammar(ToolUse(tools[:1], "required"), "", "", begun=False)
    with pytest.raises(InvalidParameter) as refused:
        await encoder.tool_grammar(ToolUse(tools, "required"), "", "", begun=False)
    assert refused.value.message == f"tools: {TOO_LARGE}"
