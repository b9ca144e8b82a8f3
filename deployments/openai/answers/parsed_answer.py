"""The answer of a chat, divided into reasoning, content and tool calls as it arrives."""

import hashlib
from collections.abc import Sequence
from functools import cached_property

import msgspec

from deployments.engine.interface import Engine
from deployments.engine.sequence_stream import Delta, SequenceStream
from deployments.openai.answers.answer import LeadingSpace
from deployments.openai.plan import AnswerParsing, Plan
from llama_core.scheduling.request import FinishReason
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.reasoning import ReasoningCounter
from llama_core.text.tokenizers.tokenizer import Tokenizer
from llama_core.text.tools.pieces import CallStart, Content, Piece, Reasoning, joined

CALL_ID_BYTES = 12  # written as hexadecimal digits


class ParsedAnswer:
    """One choice's answer: its pieces, its calls with their ids, and the number of tokens of its reasoning."""

    def __init__(
        self,
        parsing: AnswerParsing | None,
        tokenizer: Tokenizer,
        prompt: list[int],
        params: SamplingParams,
        index: int = 0,
    ) -> None:
        """prompt, params, index: of the choice."""
        self._prompt, self._params, self._index = prompt, params, index
        self._parsing = parsing
        self._reader = None if parsing is None else parsing.reader()
        self.counter: ReasoningCounter | None = None
        if parsing is not None and (marks := parsing.answer_format.marks) is not None:
            self.counter = ReasoningCounter(tokenizer, marks, begun=parsing.begun)
        self.num_calls = 0  # in the pieces so far
        self.last_call = -1  # its number, of those that have an id

    @property
    def num_reasoning(self) -> int:
        """Tokens so far."""
        return 0 if self.counter is None else self.counter.num_tokens

    def pieces(self, text: str, *, is_last: bool) -> list[Piece]:
        """The pieces that more text adds."""
        if self._parsing is None or self._reader is None:
            return [Content(text)] if text else []
        pieces = self._reader.push(text) if text else []
        if is_last:
            pieces = [*pieces, *self._reader.finish()]
        if self._parsing.hides_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        self.num_calls += sum(isinstance(piece, CallStart) for piece in pieces)
        return joined(pieces)

    def new_call_id(self) -> str:
        """The id of the next call: equal when the same request is sent again."""
        self.last_call += 1
        digest = hashlib.blake2b(self._id_seed + b"%d" % self.last_call, digest_size=CALL_ID_BYTES)
        return f"call_{digest.hexdigest()}"

    @cached_property
    def _id_seed(self) -> bytes:
        """Differs between the turns of a conversation, whose calls must not share an id even if all turns have one seed."""
        digest = hashlib.blake2b(b"".join(token.to_bytes(4, "little") for token in self._prompt), digest_size=16)
        return b"%d %d %s " % (self._params.seed, self._index, digest.digest())


class SingleAnswer(ParsedAnswer):
    """Reads the deltas of the only choice, and counts tokens: for messages, responses and calls by handle."""

    def __init__(self, engine: Engine, plan: Plan, streams: Sequence[SequenceStream]) -> None:
        ((prompt, params),) = plan.request.choices()
        super().__init__(plan.parsing, engine.tokenizer, prompt, params)
        (self.stream,) = streams
        self._answer_id = plan.answer_id
        self._space = LeadingSpace(engine.tokenizer, prompt, continues_prompt=plan.continues_prompt)
        self._num_ids = 0
        self.num_prompt = len(prompt)
        self.num_generated = 0
        self.finish_reason: FinishReason | None = None

    def take(self, delta: Delta) -> list[Piece]:
        """The pieces that a delta adds."""
        self.num_generated += len(delta.tokens)
        self.finish_reason = delta.finish_reason
        if self.counter is not None:
            self.counter.push(delta.tokens)
        return self.pieces(self._space.spaced(delta), is_last=delta.finish_reason is not None)

    def new_id(self, prefix: str) -> str:
        """The id of the next part of the answer: the same when the answer is written again."""
        self._num_ids += 1
        digest = hashlib.blake2b(f"{self._answer_id} {self._num_ids}".encode(), digest_size=16)
        return prefix + digest.hexdigest()


def named_event(content: dict[str, object]) -> bytes:
    """A server-sent event whose name is its type."""
    return b"event: %s\ndata: %s\n\n" % (str(content["type"]).encode(), msgspec.json.encode(content))
