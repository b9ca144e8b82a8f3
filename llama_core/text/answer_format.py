"""The form of a model's answers: reasoning, text and tool calls. Found once for each model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final

from llama_core.errors import InvalidParameter
from llama_core.shared_cache import SharedCache
from llama_core.text.chat_format import ChatFormat
from llama_core.text.reasoning import (
    ReasoningMarks,
    ReasoningSplitter,
    Split,
    find_marks,
    prompt_begins_reasoning,
)
from llama_core.text.tokenizer import Tokenizer
from llama_core.text.tools.lark import MarkIds, ThoughtRules, answer_grammar, reasoned_grammar
from llama_core.text.tools.leading import LeadingParser
from llama_core.text.tools.parser import AnswerParser
from llama_core.text.tools.pieces import Content, Piece, Reasoning
from llama_core.text.tools.registry import open_tool_format
from llama_core.text.tools.schema_answer import check_beside_calls
from llama_core.text.tools.tool import Call, ToolUse
from llama_core.text.tools.tool_format import ToolFormat

MAX_GRAMMAR_BYTES: Final = 3 * 2**16  # as in `SamplingParams.grammar`
_DESCRIBED_CHARS: Final = (4096, 512)  # more tokens than are watched (`execution.json_ending`), and the least
_CACHED_BYTES: Final = 2**24  # of grammars: agents send the same tools with every turn


class AnswerFormat:
    """reasoning: None for a model that does not reason. Immutable."""

    def __init__(self, tokenizer: Tokenizer, tool_format: ToolFormat, reasoning: ReasoningMarks | None) -> None:
        self.tool_format = tool_format
        self.reasoning = reasoning
        self._tokenizer = tokenizer
        self._is_spaced = tokenizer.leading_space != "keep"
        reasoning_marks = () if reasoning is None else (reasoning.opening, reasoning.closing)
        self._reasoning_ids = _control_ids(tokenizer, reasoning_marks)
        self._tool_ids = _control_ids(tokenizer, tool_format.marks)
        self._marks = MarkIds({**self._reasoning_ids, **self._tool_ids})
        self._kept = SharedCache[str](_CACHED_BYTES)

    def shown_tokens(self, use: ToolUse | None) -> frozenset[int]:
        """Control tokens whose names `reader` needs to see in the text."""
        tool_ids = self._tool_ids.values() if use is not None else ()
        return frozenset([*self._reasoning_ids.values(), *tool_ids])

    def begins_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether the answer to `prompt` begins within the reasoning."""
        return self.reasoning is not None and prompt_begins_reasoning(self.reasoning, self._tokenizer, prompt)

    def reader(self, use: ToolUse | None, *, begun: bool, leading: bool = False) -> "AnswerReader":
        """Reads one answer. begun: it begins within the reasoning. leading: its calls, if any, are all of it (`grammar_or`)."""
        splitter = None if self.reasoning is None else ReasoningSplitter(self.reasoning, begun=begun)
        parser = None if use is None else self.tool_format.parser(use)
        if parser is not None and leading:
            parser = LeadingParser(parser, self.tool_format.written_calls([Call("f", "{}")])[0])
        return AnswerReader(splitter, parser)

    def grammar(self, use: ToolUse, *, begun: bool) -> str:
        """What llguidance's matcher takes. May take some tenths of a second for tools that are not cached.

        Raises InvalidParameter that names the tool whose schema cannot be compiled.
        """
        return self._grammar(use, begun)

    def grammar_or(self, use: ToolUse, answer: str, param: str, *, begun: bool) -> str:
        """`grammar` of an answer that is either calls, or what the checked grammar `answer` describes.

        Raises InvalidParameter that names `param`, the field of `answer`, where the two cannot be told apart.
        """
        check_beside_calls(answer, self.tool_format, param)
        return self._grammar(replace(use, mode="required"), begun, answer)

    def after_reasoning(self, grammar: str, *, begun: bool) -> str:
        """`grammar` for the answer proper, behind the reasoning."""
        from llama_core.text.grammar import json_description  # loads llguidance

        assert self.reasoning is not None
        thought = ThoughtRules(self.reasoning.opening, self.reasoning.closing, begun)
        first, *others = json.loads(grammar)["grammars"]
        start = {"lark_grammar": reasoned_grammar("@proper", thought, self._marks, spaced=self._is_spaced)}
        grammars = [start, first | {"name": "proper"}, *others]
        return _described(grammars, json_description(grammar), begins_with_text=True)

    def _grammar(self, use: ToolUse, begun: bool, answer: str = "") -> str:
        make = partial(self._made_grammar, use, begun, answer)
        return self._kept.find_or_make(use.cache_scope, (use, begun, answer), make)

    def _made_grammar(self, use: ToolUse, begun: bool, answer: str = "") -> str:
        from llama_core.text.grammar import json_description, lark_grammar  # loads llguidance

        marks = self.reasoning
        thought = None if marks is None else ThoughtRules(marks.opening, marks.closing, begun)
        source = answer_grammar(
            self.tool_format.rules(use, self._marks),
            use,
            self._marks,
            thought,
            spaced=self._is_spaced,
            otherwise="@proper" if answer else "",
        )
        made = json.loads(lark_grammar(source))
        if answer:
            first, *others = json.loads(answer)["grammars"]
            made["grammars"] += [first | {"name": "proper"}, *others]
        grammar = json.dumps(made)
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            if use.bounds_numbers:
                return self._made_grammar(replace(use, bounds_numbers=False), begun, answer)
            raise InvalidParameter(
                f"tools: their schemas together make a grammar of more than {MAX_GRAMMAR_BYTES} bytes: send fewer tools, or "
                "smaller schemas",
                param="tools",
            )
        of_answer = json_description(answer)
        if answer and not of_answer:  # a pattern, or another text that is not JSON
            return grammar
        description = " ".join([*(tool.schema for tool in use.tools), *([of_answer] if answer else [])])
        has_text = use.mode == "auto" or thought is not None
        return _described(made["grammars"], description, begins_with_text=has_text)


def _described(grammars: Sequence[Any], description: str, *, begins_with_text: bool) -> str:
    """The grammars' text, with as much of the description as is needed and there is room for."""
    from llama_core.text.grammar import described  # loads llguidance

    for num_chars in _DESCRIBED_CHARS:
        text = described(grammars, description[:num_chars], begins_with_text=begins_with_text)
        if len(text.encode()) <= MAX_GRAMMAR_BYTES:
            return text
    return json.dumps({"grammars": grammars})


class AnswerReader:
    """Divides one answer into pieces, as it arrives."""

    def __init__(self, splitter: ReasoningSplitter | None, parser: AnswerParser | None) -> None:
        self._splitter, self._parser = splitter, parser

    def push(self, text: str) -> list[Piece]:
        """The pieces that no later text can change."""
        return self._pieces(Split("", text) if self._splitter is None else self._splitter.push(text))

    def finish(self) -> list[Piece]:
        """The rest, at the end of the answer."""
        pieces = [] if self._splitter is None else self._pieces(self._splitter.finish())
        return pieces if self._parser is None else pieces + self._parser.finish()

    def _pieces(self, split: Split) -> list[Piece]:
        pieces: list[Piece] = [Reasoning(split.reasoning)] if split.reasoning else []
        if not split.answer:
            return pieces
        return [*pieces, *(self._parser.push(split.answer) if self._parser is not None else [Content(split.answer)])]


def open_answer_format(tool_format: str, tokenizer: Tokenizer, chat_format: ChatFormat) -> AnswerFormat:
    """The form of the answers of the model with this tokenizer and chat format. tool_format: the argument of this name.

    Raises ConfigError for an unknown one.
    """
    has_token = _Texts(tokenizer).__contains__
    found = open_tool_format(
        tool_format, template=chat_format.template, chat_format=chat_format.name, has_token=has_token
    )
    return AnswerFormat(tokenizer, found, find_marks(chat_format.template, has_token))


class _Texts:
    """The texts of all tokens, read from the vocabulary when they are first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _texts(self) -> frozenset[bytes]:
        tokenizer = self._tokenizer
        names = (name.encode() for name in tokenizer.control_texts)
        return frozenset([*map(tokenizer.token_bytes, range(tokenizer.n_words)), *names])

    def __contains__(self, text: str) -> bool:
        return text.encode() in self._texts


def _control_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[str, int]:
    ids = tokenizer.control_texts
    return {text: ids[text] for text in texts if text in ids and tokenizer.is_control(ids[text])}
