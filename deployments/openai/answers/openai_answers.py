"""The answers of chats and of completions: what each has in place of the other's `message` or `text`."""

from collections.abc import Sequence

from deployments.engine.interface import Delta
from deployments.openai.answers.completions import Part, ResponseSerializer, encode
from deployments.openai.answers.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsWriter


class ChatSerializer(ResponseSerializer):
    id_prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _logprobs_writer(self, prompt: Sequence[int]) -> LogprobsWriter | None:
        num_top, names_ids = self._plan.num_top, self._plan.names_ids
        return None if num_top is None else ChatLogprobs(self._tokenizer, num_top, names_ids=names_ids)

    def _chunk_fields(self, part: Part) -> bytes:
        """The role is sent with the first token, because benchmarks count a chunk with the role alone as the first token."""
        if part.is_first:
            return b'"delta":{"role":"assistant","content":' + encode(part.text) + b"}"
        return b'"delta":{"content":' + encode(part.text) + b"}" if part.text else b'"delta":{}'

    def _choice_fields(self, index: int, part: Part) -> bytes:
        return b'"message":' + encode({"role": "assistant", "content": part.text, "refusal": None})

    def _answer_fields(self) -> bytes:
        ids = self._prompt_ids(0) if self._plan.returns_ids else b""
        return ids + (b',"prompt_logprobs":' + self._prompt_logprobs[0].written if self._prompt_logprobs else b"")

    def _first_event_fields(self) -> bytes:
        return self._prompt_ids(0) if self._plan.returns_ids else b""


class CompletionSerializer(ResponseSerializer):
    id_prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def _logprobs_writer(self, prompt: Sequence[int]) -> LogprobsWriter | None:
        num_top, names_ids = self._plan.num_top, self._plan.names_ids
        before = [] if self._plan.echo else prompt
        return None if num_top is None else CompletionLogprobs(self._tokenizer, num_top, before, names_ids=names_ids)

    def _ids(self, index: int, delta: Delta, is_first: bool) -> bytes:
        """vLLM gives the prompt's ids beside those of each choice."""
        return super()._ids(index, delta, is_first) + (self._prompt_ids(index) if is_first else b"")

    def _chunk_fields(self, part: Part) -> bytes:
        return b'"text":' + encode(part.text)

    def _choice_fields(self, index: int, part: Part) -> bytes:
        fields = b'"text":' + encode(part.text)
        if not self._prompt_logprobs:
            return fields
        return fields + b',"prompt_logprobs":' + self._prompt_logprobs[index // self._plan.request.n].written
