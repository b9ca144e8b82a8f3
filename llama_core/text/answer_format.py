"""The form of a model's answers: reasoning, text and tool calls. Found once for each model."""

from collections.abc import Iterable, Sequence
from functools import cache

from llama_core.text.chat_format import ChatFormat
from llama_core.text.reasoning import Marks, Split, Splitter, find_marks, open_splitter, prompt_begins_reasoning
from llama_core.text.tokenizers.tokenizer import Tokenizer
from llama_core.text.tools.lark import MarkIds
from llama_core.text.tools.parser import AnswerParser, LeadingParser
from llama_core.text.tools.pieces import Content, Piece, Reasoning
from llama_core.text.tools.tool import Call, ToolUse
from llama_core.text.tools.tool_format import ToolFormat, open_tool_format


class AnswerFormat:
    """marks: of the reasoning; None if the model does not reason before it answers. is_spaced: a space may come first, which
    the tokenizer drops from the text. Immutable."""

    def __init__(self, tokenizer: Tokenizer, tool_format: ToolFormat, marks: Marks | None) -> None:
        self.tool_format = tool_format
        self.marks = marks
        self.is_spaced = tokenizer.leading_space != "keep"
        self._tokenizer = tokenizer
        self._reasoning_ids = _control_ids(tokenizer, () if marks is None else marks.tokens)
        self._tool_ids = _control_ids(tokenizer, tool_format.marks)
        self.mark_ids = MarkIds({**self._reasoning_ids, **self._tool_ids})

    def shown_tokens(self, use: ToolUse | None) -> frozenset[int]:
        """Control tokens whose names `reader` needs to see in the text."""
        tool_ids = self._tool_ids.values() if use is not None else ()
        return frozenset([*self._reasoning_ids.values(), *tool_ids])

    def begins_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether the answer to `prompt` begins within the reasoning."""
        return self.marks is not None and prompt_begins_reasoning(self._tokenizer, prompt, self.marks)

    def reader(self, use: ToolUse | None, *, begun: bool, leading: bool = False) -> "AnswerReader":
        """Reads one answer. begun: it begins within the reasoning. leading: its calls, if any, are all of it."""
        splitter = None if self.marks is None else open_splitter(self.marks, begun=begun)
        parser = None if use is None else self.tool_format.parser(use)
        if parser is not None and leading:
            parser = LeadingParser(parser, self.tool_format.written_calls([Call("f", "{}")])[0])
        return AnswerReader(splitter, parser)


class AnswerReader:
    """Divides one answer into pieces, as it arrives."""

    def __init__(self, splitter: Splitter | None, parser: AnswerParser | None) -> None:
        self._splitter, self._parser = splitter, parser

    def push(self, text: str) -> list[Piece]:
        """The pieces that no later text can change."""
        splits = [Split("", text)] if self._splitter is None else self._splitter.push(text)
        return [piece for split in splits for piece in self._pieces(split)]

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

    @cache
    def texts() -> frozenset[bytes]:
        names = (name.encode() for name in tokenizer.control_texts)
        return frozenset([*map(tokenizer.token_bytes, range(tokenizer.n_words)), *names])

    def has_token(text: str) -> bool:
        return text.encode() in texts()

    found = open_tool_format(
        tool_format, template=chat_format.template, chat_format=chat_format.name, has_token=has_token
    )
    return AnswerFormat(tokenizer, found, find_marks(chat_format.template, has_token))


def _control_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, int]:
    ids = tokenizer.control_texts
    return {text: ids[text] for text in texts if text in ids and tokenizer.is_control(ids[text])}
