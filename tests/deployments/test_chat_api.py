"""Chats by handle: tool calls, structured output and later turns, on the deployment's class over scripted ranks."""

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.handle_types import ChatAnswer, ChatRequest, whole
from llama_core.errors import InvalidDialog, InvalidParameter
from llama_core.grammar.build import choice_grammar, json_schema_grammar
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.tools.tool import Call, Tool
from llama_core.text.tools.tool_format import find_tool_format
from tests.deployments.handles import ingress_over
from tests.support.fake_rank_group import FakeGroup
from tests.support.fake_ranks import EOS
from tests.support.tool_calls import TOOLS, random_answer

HELLO = [{"role": "user", "content": "Hello"}]
PARAMS = SamplingParams(0.0, max_tokens=1000)


class Script:
    """The rule for the next token: the answer's tokens, whatever the prompt. One sequence at a time."""

    def __init__(self) -> None:
        self.answer: list[int] = []
        self.prompt_len = 0

    def __call__(self, tokens: list[int], seed: int = 0) -> int:
        at = len(tokens) - self.prompt_len
        return self.answer[at] if at < len(self.answer) else EOS


class Replica:
    """`api`: the deployment's methods. Its ranks write `script.answer`."""

    def __init__(self) -> None:
        self.script = Script()
        group = FakeGroup(num_blocks=256, token=self.script)
        self.api = ingress_over(group, max_seq_len=2048, max_batch_size=2, speculation=False)
        self.service = self.api.service
        self.prompt: list[int] = []
        self.grammar = ""
        submit = self.service.submit

        def noted(request: Request, **options: Any) -> Any:
            [(self.prompt, params)] = request.choices()
            self.script.prompt_len, self.grammar = len(self.prompt), params.grammar
            return submit(request, **options)

        self.service.submit = noted

    def writes(self, text: str) -> None:
        self.script.answer = self.service.service.tokenizer.encode(text, bos=False, eos=False)

    async def chat(self, **fields: Any) -> ChatAnswer:
        """The answer, which is the same in parts."""
        request = ChatRequest(**{"messages": HELLO, **fields})
        answer: ChatAnswer = await self.api.chat(request, PARAMS)
        parts = [part async for part in self.api.stream_chat(request, PARAMS)]
        assert whole(parts).message() == answer.message()
        arguments = [""] * len(answer.tool_calls)
        for call in (call for part in parts for call in part.tool_calls):
            assert 0 <= call.index < len(arguments)
            arguments[call.index] += call.arguments
        assert arguments == [call.arguments for call in answer.tool_calls]
        assert self.service.describe().blocks_used == 0
        return answer


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica()
    await made.service.start()
    yield made
    await made.service.stop()


async def test_answers_have_their_calls_whole_and_in_parts(replica: Replica) -> None:
    rng = random.Random(14)
    for _ in range(3):  # without a call, with one and with two
        text, content, calls = random_answer(rng, "llama2")
        replica.writes(text)
        answer = await replica.chat(tools=TOOLS)
        found = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
        assert found == [(call.name, json.loads(call.arguments)) for call in calls]
        assert answer.content == content.lstrip()
        assert answer.finish_reason == ("tool_calls" if calls else "stop")
        assert len({call.id for call in answer.tool_calls}) == len(calls)
        assert replica.grammar and answer.num_prompt_tokens == len(replica.prompt)


async def test_calls_and_results_are_in_the_next_prompt(replica: Replica) -> None:
    replica.writes(find_tool_format("llama2").written_calls([Call("get_weather", '{"city": "Rome"}')]))
    first = await replica.chat(tools=[TOOLS[0].described()], tool_choice="required")
    (call,) = first.tool_calls
    replica.writes("It is sunny.")
    second = await replica.chat(
        messages=[*HELLO, first.message(), call.result("25 degrees")], tools=[TOOLS[0].described()]
    )
    assert (second.content, second.tool_calls, second.finish_reason) == ("It is sunny.", [], "stop")
    prompt = replica.service.service.tokenizer.decode(replica.prompt)
    assert '"city": "Rome"' in prompt and "25 degrees" in prompt


async def test_the_grammar_is_that_of_the_tools_or_of_the_answer(replica: Replica) -> None:
    replica.writes("yes")
    await replica.chat()
    assert replica.grammar == ""
    await replica.chat(tools=TOOLS, tool_choice="none")
    assert replica.grammar == ""
    await replica.chat(structured_outputs={"choice": ["yes", "no"]})
    by_field = replica.grammar
    params = SamplingParams(0.0, grammar=choice_grammar(["yes", "no"]))
    await replica.api.chat(ChatRequest(HELLO), params)
    assert replica.grammar == by_field != ""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    await replica.chat(response_format=wanted, tools=TOOLS)
    beside_tools = replica.grammar
    await replica.api.chat(ChatRequest(HELLO, TOOLS), SamplingParams(0.0, grammar=json_schema_grammar(schema)))
    assert replica.grammar == beside_tools != by_field


async def test_the_ending_of_the_template_is_left_out_and_the_limit_is_told(replica: Replica) -> None:
    replica.writes("Rome. ")
    assert (await replica.chat()).content == "Rome."
    cut = await replica.api.chat(ChatRequest(HELLO), SamplingParams(0.0, max_tokens=1, logprobs=0))
    assert cut.finish_reason == "length" and len(cut.tokens) == len(cut.logprobs) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"not": {"pattern": "a"}}}}}},
         "response_format"),
        ({"structured_outputs": {"json": {"const": float("nan")}}}, "structured_outputs.json"),
        ({"tools": [{"type": "function",
                     "function": {"name": "a", "strict": True, "parameters": {"properties": {"a": {"type": "x"}}}}}]},
         "tools[0].function.parameters"),
        ({"tools": [Tool("a", schema='{"type": "object", "properties": {"a": {"type": "x"}}}', strict=True)]},
         "tools[0].function.parameters"),
        ({"reasoning_effort": "much" * 100}, "reasoning_effort"),
        ({"stop": [""]}, "stop"),
    ],
)  # fmt: skip
async def test_a_bad_field_is_named(replica: Replica, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        await replica.api.chat(ChatRequest(HELLO, **fields), PARAMS)
    assert refused.value.param == param


async def test_a_bad_message_and_two_grammars_are_refused(replica: Replica) -> None:
    with pytest.raises(InvalidDialog) as refused:
        await replica.api.chat(ChatRequest([{"role": "user", "content": 3}]), PARAMS)
    assert refused.value.index == 0
    both = SamplingParams(grammar=choice_grammar(["a"]))
    with pytest.raises(InvalidParameter) as excluded:
        await replica.api.chat(ChatRequest(HELLO, response_format={"type": "json_object"}), both)
    assert excluded.value.param == "response_format"
