"""Writes answers as OpenAI's responses: one object, or a stream of numbered events of which the last has that object."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from deployments.engine.interface import Engine
from deployments.engine.sequence_stream import Delta, SequenceStream
from deployments.http.responses_api.content import OFFERED
from deployments.http.responses_api.schemas import ResponsesBody
from deployments.openai.answers.answer import PING, CollectedChoice, Sliced
from deployments.openai.answers.parsed_answer import SingleAnswer, named_event
from deployments.openai.plan import Plan
from deployments.openai.prompt_encoder import PromptEncoder
from llama_core.errors import LlamaError
from llama_core.scheduling.request import FinishReason
from llama_core.text.tools.pieces import Arguments, CallStart, Content, Piece, Reasoning

Fields = dict[str, object]
Namespaces = Mapping[str, tuple[str, str]]  # as `ResponsesBody.namespaces`


class ItemKind(NamedTuple):
    """part: further fields of the content part that holds the text; None for items without one."""

    id_prefix: str
    text_event: str
    text_field: str  # of the event that ends the text
    part: Fields | None = None


_MESSAGE = ItemKind("msg_", "output_text", "text", {"annotations": [], "logprobs": []})
_REASONING = ItemKind("rs_", "reasoning_text", "text", {})
_CALL = ItemKind("fc_", "function_call_arguments", "arguments")
_KINDS = {Content: _MESSAGE, Reasoning: _REASONING, CallStart: _CALL, Arguments: _CALL}


class OutputItem:
    """One item of a response, as far as it has been generated."""

    def __init__(self, piece: Piece, namespaces: Namespaces, new_id: Callable[[str], str]) -> None:
        """piece: which begins it. new_id: as `SingleAnswer.new_id`."""
        assert not isinstance(piece, Arguments), "arguments follow the beginning of their call"
        self.kind = _KINDS[type(piece)]
        self.id = new_id(self.kind.id_prefix)
        self.texts: list[str] = []
        if isinstance(piece, CallStart):
            self._call = {"call_id": new_id("call_"), "name": piece.name}
            if piece.name in namespaces:
                self._call["namespace"], self._call["name"] = namespaces[piece.name]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def indexed(self) -> Fields:
        """Further fields of the events of its text."""
        if self.kind is _CALL:
            return {}
        return {"content_index": 0, "logprobs": []} if self.kind is _MESSAGE else {"content_index": 0}

    def part(self, text: str) -> Fields | None:
        """The content part that holds `text`; None if the item has none."""
        return None if self.kind.part is None else {"type": self.kind.text_event, "text": text, **self.kind.part}

    def written(self, status: str) -> Fields:
        """The item. status: in_progress, completed or incomplete."""
        if self.kind is _CALL:
            return {"id": self.id, "type": "function_call", "status": status, **self._call, "arguments": self.text}
        content = [] if status == "in_progress" else [self.part(self.text)]
        if self.kind is _MESSAGE:
            return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}
        fields: Fields = {"id": self.id, "type": "reasoning", "summary": [], "content": content}
        return {**fields, "encrypted_content": None, "status": status}

    def takes(self, piece: Piece) -> bool:
        """Whether a piece is more of this item."""
        return not isinstance(piece, CallStart) and _KINDS[type(piece)] is self.kind


_UNSET_TOOL: Fields = {"description": None, "parameters": None, "strict": False}
OUT_OF_TOKENS = {"reason": "max_output_tokens"}


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """What a response has of the body. echo: the fields that repeat it. namespaces: as `ResponsesBody.namespaces`. is_stored:
    unless the client wants that it is not."""

    echo: Mapping[str, msgspec.Raw]
    namespaces: Mapping[str, tuple[str, str]]
    is_stored: bool


async def plan_response(body: ResponsesBody, engine: Engine, encoder: PromptEncoder) -> Plan:
    """A chat's plan. Raises InvalidRequest as `plan_chat` does, which names the fields of responses."""
    plan = await body.chat.plan(engine, encoder)
    echo = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in _echo(body, plan).items()}
    return replace(plan, form=ResponseForm(echo, body.namespaces, body.store is not False))


class ResponsesSerializer:
    """Implements `AnswerSerializer`."""

    ping = PING

    def __init__(self, engine: Engine, plan: Plan, streams: Sequence[SequenceStream]) -> None:
        self._answer = SingleAnswer(engine, plan, streams)
        self._head: Fields = {
            "id": f"resp_{plan.answer_id}",
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "model": engine.model_id,
        }
        self.form: ResponseForm = plan.form
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None  # the last item, while it grows
        self._num_events = 0
        self.on_end: Callable[[Fields], None] | None = None  # keeps the whole response

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return b"".join(self._event(f"response.{name}", response=response) for name in ("created", "in_progress"))

    def chunk(self, index: int, delta: Delta) -> bytes:
        return b"".join(event for piece in self._answer.take(delta) for event in self._piece_events(piece))

    def end_of_stream(self) -> bytes:
        status = self._status()
        events = self._item_done(status)
        events.append(self._event(f"response.{status}", response=self._ended(status)))
        return b"".join(events)

    def failure(self, error: LlamaError, request_id: str) -> bytes:
        """The response as far as it got. Its `error` has one of OpenAI's codes, and the message says more."""
        cause = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response={**self._response("failed"), "error": cause})

    def whole(self, choices: Sequence[CollectedChoice]) -> Sliced[bytes]:
        yield
        for piece in self._answer.take(choices[0].joined()):
            self._item_of(piece)
        return msgspec.json.encode(self._ended(self._status()))

    def _piece_events(self, piece: Piece) -> list[bytes]:
        events = [] if self._open is not None and self._open.takes(piece) else self._item_done("completed")
        num_before = len(self._items)
        item = self._item_of(piece)
        if len(self._items) > num_before:
            added = item.written("in_progress")
            events.append(self._event("response.output_item.added", output_index=self._last, item=added))
            if (part := item.part("")) is not None:
                events.append(self._part_event("added", item, part))
        if not isinstance(piece, CallStart):
            events.append(self._item_event(f"{item.kind.text_event}.delta", item, delta=piece.text, **item.indexed))
        return events

    def _item_of(self, piece: Piece) -> OutputItem:
        """The item that a piece begins or extends; the piece is added to it."""
        if self._open is None or not self._open.takes(piece):
            self._open = OutputItem(piece, self.form.namespaces, self._answer.new_id)
            self._items.append(self._open)
        if not isinstance(piece, CallStart):
            self._open.texts.append(piece.text)
        return self._open

    def _item_done(self, status: str) -> list[bytes]:
        """The events that end the open item."""
        item, self._open = self._open, None
        if item is None:
            return []
        text = {item.kind.text_field: item.text}
        events = [self._item_event(f"{item.kind.text_event}.done", item, **text, **item.indexed)]
        if (part := item.part(item.text)) is not None:
            events.append(self._part_event("done", item, part))
        written = item.written(status)
        return [*events, self._event("response.output_item.done", output_index=self._last, item=written)]

    def _part_event(self, what: str, item: OutputItem, part: Fields) -> bytes:
        return self._item_event(f"content_part.{what}", item, content_index=0, part=part)

    def _item_event(self, kind: str, item: OutputItem, **fields: object) -> bytes:
        return self._event(f"response.{kind}", item_id=item.id, output_index=self._last, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        self._num_events += 1
        return named_event({"type": kind, "sequence_number": self._num_events - 1, **fields})

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    def _status(self) -> str:
        return "incomplete" if self._answer.finish_reason is FinishReason.LENGTH else "completed"

    def _ended(self, status: str) -> Fields:
        response = self._response(status)
        if self.on_end is not None:
            self.on_end(response)
        return response

    def _response(self, status: str) -> Fields:
        has_ended = status in ("completed", "incomplete")
        last = "completed" if status == "completed" else "incomplete"  # the item that was cut off, if one was
        statuses = ["completed"] * (len(self._items) - 1) + [last]
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": OUT_OF_TOKENS if status == "incomplete" else None,
            "output": [item.written(each) for item, each in zip(self._items, statuses, strict=False)],
            **self.form.echo,
            "store": self.on_end is not None,
            "usage": self._usage() if has_ended else None,
        }

    def _usage(self) -> Fields:
        answer = self._answer
        return {
            "input_tokens": answer.num_prompt,
            "input_tokens_details": {"cached_tokens": answer.stream.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.num_generated,
            "output_tokens_details": {"reasoning_tokens": answer.num_reasoning},
            "total_tokens": answer.num_prompt + answer.num_generated,
        }


def _echo(body: ResponsesBody, plan: Plan) -> Fields:
    """The fields of a response that repeat the request, with the values that are in force."""
    params, reasoning = plan.request.params[0], body.reasoning
    given = None if body.text is None or body.text.format is None else body.text.format
    form = {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": form, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_UNSET_TOOL | tool.model_dump(exclude_none=True) for tool in body.tools if tool.type in OFFERED],
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
