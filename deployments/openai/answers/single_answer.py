"""One answer of a chat, divided into pieces, for the formats that have one choice a request: messages and responses."""

import hashlib
from collections.abc import Callable, Sequence

from deployments.engine.interface import Delta, Engine, TokenStream
from deployments.openai.answers.answer import LeadingSpace
from deployments.openai.plan import Plan
from llama_core.scheduling.request import FinishReason
from llama_core.text.reasoning import ReasoningCounter
from llama_core.text.tools.pieces import CallStart, Content, Piece, joined


class SingleAnswer:
    """Reads the deltas of the only choice, and counts tokens."""

    def __init__(self, engine: Engine, plan: Plan, streams: Sequence[TokenStream]) -> None:
        (self._stream,) = streams
        self._id, self._num_ids = plan.answer_id, 0
        self._space = LeadingSpace(engine.tokenizer, plan.request.prompts[0], continues_prompt=plan.continues_prompt)
        self._reader = self._counter = None
        if (parsing := plan.parsing) is not None:
            self._reader = parsing.reader()
            if (marks := parsing.answer_format.reasoning) is not None:
                self._counter = ReasoningCounter(marks, engine.tokenizer, begun=parsing.begun)
        self.num_prompt = len(plan.request.prompts[0])
        self.num_generated = 0
        self.num_calls = 0
        self.finish_reason: FinishReason | None = None

    def take(self, delta: Delta) -> list[Piece]:
        """The pieces that a delta adds."""
        self.num_generated += len(delta.tokens)
        self.finish_reason = delta.finish_reason
        if self._counter is not None:
            self._counter.push(delta.tokens)
        text = self._space.spaced(delta)
        if self._reader is None:
            return [Content(text)] if text else []
        pieces = self._reader.push(text) if text else []
        if delta.finish_reason is not None:
            pieces += self._reader.finish()
        self.num_calls += sum(isinstance(piece, CallStart) for piece in pieces)
        return joined(pieces)

    def new_id(self, prefix: str) -> str:
        """The id of the next part of the answer: the same when the answer is written again."""
        self._num_ids += 1
        return prefix + hashlib.blake2b(f"{self._id} {self._num_ids}".encode(), digest_size=16).hexdigest()

    @property
    def num_cached(self) -> int:
        return self._stream.num_cached_tokens

    @property
    def num_reasoning(self) -> int:
        return 0 if self._counter is None else self._counter.num_tokens

    @property
    def matched_stop(self) -> str | None:
        return self._stream.matched_stop


def named_event(content: dict[str, object], encode: Callable[[object], bytes]) -> bytes:
    """A server-sent event whose name is its type."""
    return b"event: %s\ndata: %s\n\n" % (str(content["type"]).encode(), encode(content))
