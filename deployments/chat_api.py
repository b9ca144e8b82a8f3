"""Chats by Serve handle, typed: tools, reasoning and structured output, as /v1/chat/completions has them.

handle = serve.get_app_handle("llama")
answer = handle.chat.remote(ChatRequest(messages, tools=tools), SamplingParams(max_tokens=256)).result()
messages += [answer.message(), *(call.result(run(call.name, call.arguments)) for call in answer.tool_calls)]
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deployments.chat_answers import ChatAnswer, ChatPart, ChatReader, whole
from deployments.engine.sequence_stream import SequenceStream
from deployments.handle_call import Call, checked_limit, until_aborted
from deployments.http.plan import Plan, answer_parsing, chat_grammar, encode_chat
from deployments.http.prompt_encoder import PromptEncoder, TextLimits
from deployments.http.request_body import validate
from deployments.http.schemas import ChatBody
from deployments.http.structured_outputs import grammar_of
from deployments.typed_api import TypedHandleApi
from llama_core.errors import InvalidParameter
from llama_core.grammar.build import callers_grammar
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.spellings import spellings
from llama_core.text.tools.tool import Tool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a chat asks for beside its sampling parameters; the fields are those of /v1/chat/completions.

    messages: OpenAI's objects. tools: OpenAI's objects, or `Tool`. response_format, structured_outputs: as over HTTP.
    stop, bad_words, skip_special_tokens, timeout_s, request_id, owner, priority: as of `sample`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool | Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    stop: Sequence[str] = ()
    request_id: str = ""
    owner: str = ""
    priority: int = 0
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True
    timeout_s: float | None = None

    def body(self) -> ChatBody:
        """The fields, checked. Raises InvalidParameter or InvalidDialog that names one."""
        given: dict[str, Any] = {
            "messages": [dict(message) for message in self.messages],
            "tools": [_openai_tool(tool) for tool in self.tools] or None,
            "tool_choice": _plain(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _plain(self.response_format),
            "structured_outputs": _plain(self.structured_outputs),
            "reasoning_effort": self.reasoning_effort,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": _plain(self.chat_template_kwargs),
            "stop": list(self.stop),
            "bad_words": _plain(self.bad_words),
        }
        return validate(ChatBody, given)


class ChatHandleApi(TypedHandleApi):
    """`LlamaIngress` inherits these methods."""

    async def chat(self, request: ChatRequest, params: SamplingParams) -> ChatAnswer:
        """Answer a chat. The seed is the parameters' own. `params.grammar` is for the text of the answer, as
        `structured_outputs` is. Raises what `sample` raises, and InvalidParameter that names a field of the request.
        """
        with self._call("chat", request.request_id) as call:
            try:
                stream, reader = await self._begin_chat(call, request, params)
                return whole([part async for part in _parts(stream, call, reader)])
            finally:
                call.cancel()

    async def stream_chat(self, request: ChatRequest, params: SamplingParams) -> AsyncIterator[ChatPart]:
        """`chat` in parts, for `handle.options(stream=True)`. The last has the finish reason."""
        with self._call("stream_chat", request.request_id) as call:
            try:
                stream, reader = await self._begin_chat(call, request, params)
                async for part in _parts(stream, call, reader):
                    yield part
            finally:
                call.cancel()

    async def _begin_chat(
        self, call: Call, request: ChatRequest, params: SamplingParams
    ) -> tuple[SequenceStream, ChatReader]:
        limit_s = checked_limit(request.timeout_s)
        plan = await self._chat_plan(request, params)
        own = plan.params[0]
        call.asks(plan.prompts, own.max_tokens, own.temperature, own.top_p)
        call.streams += self.service.submit_all(
            list(plan.choices()),
            stop=plan.stop,
            owner=request.owner,
            priority=request.priority,
            skip_special_tokens=request.skip_special_tokens,
            shown_tokens=frozenset() if plan.parsing is None else plan.parsing.shown_tokens,
            is_timed=call.is_traced,
        )
        call.ends_within(limit_s)
        (stream,) = call.streams
        return stream, ChatReader(self.service, plan, stream)

    async def _chat_plan(self, request: ChatRequest, params: SamplingParams) -> Plan:
        body, encoder = request.body(), self._chat_encoder.of(request.owner)
        use = body.tool_use()
        prompt = await encode_chat(body, encoder)
        grammar, param = grammar_of(body)
        if grammar and params.grammar:
            raise InvalidParameter(f"{param}: {param} and params.grammar exclude each other", param=param)
        if params.grammar:
            grammar, param = callers_grammar(params.grammar), "grammar"
        parsing = answer_parsing(body, self.service, use, prompt, has_grammar=bool(grammar))
        bad_words = (*params.bad_words, *spellings(body.bad_words, self.service.tokenizer))
        return Plan(
            [prompt],
            [replace(params, grammar=await chat_grammar(grammar, param, encoder, parsing), bad_words=bad_words)],
            stop=tuple(body.stop),
            answer_ending=self.service.chat_format.answer_ending,
            continues_prompt=body.chat_options.continue_final_message,
            parsing=parsing,
        )

    @property
    def _chat_encoder(self) -> PromptEncoder:
        """Made when it is first asked for: Serve owns the constructor."""
        if "_made_chat_encoder" not in self.__dict__:
            self.__dict__["_made_chat_encoder"] = PromptEncoder(self.service, TextLimits())
        encoder: PromptEncoder = self.__dict__["_made_chat_encoder"]
        return encoder


async def _parts(stream: SequenceStream, call: Call, reader: ChatReader) -> AsyncIterator[ChatPart]:
    async for delta in until_aborted(stream):
        call.on_delta()
        yield reader.part(delta)


def _openai_tool(tool: Tool | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(tool, Tool):
        return dict(tool)
    described = tool.described()
    return {**described, "function": {**described["function"], "strict": tool.strict}}


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
