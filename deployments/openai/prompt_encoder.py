"""Turns the texts of requests into token ids, on the event loop or in a thread.

Short texts are encoded on the event loop, long ones in a few threads, so that streams continue: SentencePiece
releases the interpreter's lock. A prompt that cannot fit is refused as early as that is certain: by its number of
characters before anything is encoded, or by its tokens before the next prompt is encoded.
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

from deployments.engine.interface import Engine
from deployments.openai.answers.logprobs import names_of
from deployments.openai.dialog_fields import ChatMessage
from deployments.openai.limiter import ConcurrencyLimiter
from deployments.openai.merged_roles import encode_merging
from llama_core.errors import InvalidDialog, InvalidParameter
from llama_core.grammar.answers import answer_grammar
from llama_core.scheduling.request import check_length
from llama_core.text.chat_format import NO_OPTIONS, ChatOptions, Message
from llama_core.text.tools.plain_dialog import has_tools, plain_dialog
from llama_core.text.tools.tool import ToolUse

INLINE_CHARS = 8192  # of all texts of a request together: about 5 ms of encoding
CHARS_PER_MESSAGE = 32  # a chat's message takes as much time as this many characters
CHARS_PER_ID = 4  # an id in a list takes as much memory as this many wide characters
# Of grammars that are being checked or wait, each of which takes up to 0.5 s of processor time.
MAX_CHECKED_CHARS = 2**22
LEAST_CHECKED_CHARS = 2**14  # that a grammar counts for

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Bounds for texts too long for the event loop, of all requests together."""

    threads: int = 2  # a request's texts are encoded one after the other, in one thread
    max_chars: int = 2**25  # of texts being encoded or waiting; a wide character takes 4 bytes


class PromptEncoder:
    """Encodes and decodes texts for every route, through one limiter."""

    _engine: Engine  # of the request's model

    def __init__(self, limits: TextLimits) -> None:
        """`of` makes one that can be used."""
        self._limiter = ConcurrencyLimiter(limits.threads, limits.max_chars)
        self._checks = ConcurrencyLimiter(1, MAX_CHECKED_CHARS, "grammars are being checked")
        self._owner = ""
        self._now_s: int | None = None

    def of(self, owner: str, engine: Engine, now_s: int | None = None) -> "PromptEncoder":
        """This encoder for requests of `owner`: owners take turns in checks of grammars, and have caches of their own. engine:
        of the request's model. now_s: as `ChatOptions` has it."""
        own = copy.copy(self)
        own._owner, own._engine, own._now_s = owner, engine, now_s
        return own

    async def prompts(
        self,
        prompts: list[str] | list[list[int]],
        *,
        bos: bool,
        n: int,
        parse_special: bool = False,
        param: str = "prompt",
        num_new: int = 1,
        appends: bool = False,
    ) -> list[list[int]]:
        """Ids of each prompt; those given as ids are checked. `n` sequences will be made of each.

        parse_special: names of control tokens in a text become those tokens. param: the field that errors name. num_new: the
        tokens for which the context must have room after each prompt. appends: a text ends with `Tokenizer.appended`.

        Raises ContextLengthExceeded, InvalidParameter or, where too many long texts wait already, QueueFull.
        """
        tokenizer, max_seq_len, budget = self._engine.tokenizer, self._engine.max_seq_len, self._budget(n)
        ending = [*tokenizer.appended] if appends else []
        are_texts = isinstance(prompts[0], str)
        least = [tokenizer.min_tokens(len(prompt)) if are_texts else len(prompt) for prompt in prompts]
        for length in least:
            check_length(length, num_new, max_seq_len, param=param, is_lower_bound=are_texts)
        _check_total(sum(least), budget, param)

        def encoded() -> list[list[int]]:
            found: list[list[int]] = []
            for prompt in prompts:
                if isinstance(prompt, str):
                    prompt = self._ids(prompt, bos, parse_special) + ending
                    if not prompt:
                        raise InvalidParameter.of(param, "must not be empty when no BOS is added")
                    check_length(len(prompt), num_new, max_seq_len, param=param)
                else:
                    self._check_ids(prompt, param)
                found.append(prompt)
                _check_total(sum(map(len, found)), budget, param)
            return found

        return await self._run(sum(map(len, prompts)), encoded)  # an id, which is checked, counts as a character

    async def dialog(
        self, messages: Sequence[ChatMessage], options: ChatOptions = NO_OPTIONS, *, n: int = 1
    ) -> list[int]:
        """Ids of a chat as the chat format writes it. Raises what `prompts` raises, InvalidDialog or SpecialTags."""
        chat_format, max_seq_len = self._engine.chat_format, self._engine.max_seq_len
        if self._now_s is not None:
            options = replace(options, now_s=self._now_s)
        given = [_message(message, chat_format.template is not None) for message in messages]

        def admit(least_tokens: int) -> None:
            check_length(least_tokens, 1, max_seq_len, param="messages", is_lower_bound=True)

        admit(chat_format.min_tokens(given))

        def encode() -> list[int]:
            dialog: Sequence[Message] = given
            sent: Sequence[int | None] | None = None  # the index of each message as the client has it
            if (options.tools or has_tools(dialog)) and not chat_format.writes_tools:
                tool_format = self._engine.answer_format.tool_format
                offers = chat_format.offers_tools
                tools = () if offers else options.tools
                role = (offers and tool_format.result_role) or chat_format.result_role
                dialog, sent = plain_dialog(dialog, tools, tool_format, role)
            ids = encode_merging(dialog, lambda messages: chat_format.encode(messages, options, admit), sent)
            if not ids:
                raise InvalidDialog("messages: the chat template writes nothing for this dialog")
            check_length(len(ids), 1, max_seq_len, param="messages")
            _check_total(len(ids), self._budget(n), param="messages")
            return ids

        num_chars = sum(len(m.content) + len(m.reasoning_text or "") + CHARS_PER_MESSAGE for m in messages)
        calls = [call["function"]["arguments"] for m in messages for call in m.tool_calls]
        num_chars += sum(map(len, calls)) + CHARS_PER_MESSAGE * len(calls)
        num_chars += sum(len(tool.schema) for tool in options.tools)
        return await self._run(num_chars, encode, in_thread=not chat_format.is_quick)

    async def text(self, text: str, *, bos: bool, parse_special: bool | None = None) -> list[int]:
        """Ids of a text that may be longer than the context, as /tokenize allows.

        A text that is exactly one control token's name, without BOS, is that token unless `parse_special` is False: lm-eval
        learns BOS so.
        """
        control = None if bos or parse_special is not None else self._engine.tokenizer.control_texts.get(text)
        if control is not None:
            return [control]
        parse_special = bool(parse_special)
        return await self._run(len(text), lambda: self._ids(text, bos, parse_special))

    async def grammar(self, wanted: str, param: str, use: ToolUse | None = None, *, begun: bool | None = None) -> str:
        """The checked grammar of an answer, as `answer_grammar` makes it. Raises what that raises, and QueueFull."""
        if not wanted and use is None:
            return ""
        num_chars = len(wanted) + (0 if use is None else sum(len(tool.schema) for tool in use.tools))
        form, scope = self._engine.answer_format, self._engine.cache_scope(self._owner)
        make = partial(answer_grammar, form, wanted, param, use, begun=begun, scope=scope)
        return await self._checks.run(make, max(num_chars, LEAST_CHECKED_CHARS), self._owner)

    async def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        decode = partial(self._engine.tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
        return await self._run(CHARS_PER_ID * len(ids), decode)

    async def names(self, ids: list[int]) -> list[str]:
        """The name of each token, as log-probabilities have it."""
        names = names_of(cast(Hashable, self._engine.tokenizer))
        return await self._run(CHARS_PER_ID * len(ids), lambda: [names[token_id] for token_id in ids])

    def _ids(self, text: str, bos: bool, parse_special: bool) -> list[int]:
        tokenizer = self._engine.tokenizer
        return tokenizer.encode_special(text, bos=bos) if parse_special else tokenizer.encode(text, bos=bos, eos=False)

    def _check_ids(self, ids: list[int], param: str) -> None:
        vocab_size = self._engine.tokenizer.n_words
        if not (min(ids) >= 0 and max(ids) < vocab_size):
            raise InvalidParameter.of(param, f"token ids must be from 0 to {vocab_size - 1}")

    def _budget(self, n: int) -> int:
        """Tokens that the prompts of one request may have together, when each is continued `n` times."""
        return self._engine.max_request_tokens // n

    async def _run(self, num_chars: int, work: Callable[[], Result], *, in_thread: bool = False) -> Result:
        """in_thread: whatever the length; a chat template may take long for a short text."""
        if num_chars <= INLINE_CHARS and not in_thread:
            return work()
        return await self._limiter.run(work, num_chars)


def _message(message: ChatMessage, has_template: bool) -> Message:
    """Only a template may know the role "developer", OpenAI's newer name of "system"."""
    role: str = message.role
    if role == "developer" and not has_template:
        role = "system"
    elif role == "function":  # OpenAI's older name of "tool"
        role = "tool"
    written: dict[str, object] = {"role": role, "content": message.content}
    for name in ("name", "tool_call_id", "tool_calls"):
        if value := getattr(message, name):
            written[name] = value
    if thoughts := message.reasoning_text:
        written["reasoning_content"] = thoughts
    return cast(Message, written)


def _check_total(num_tokens: int, budget: int, param: str) -> None:
    if num_tokens > budget:
        raise InvalidParameter.of(
            param, f"with this n the prompts of one request may have {budget} tokens together; these have more"
        )
