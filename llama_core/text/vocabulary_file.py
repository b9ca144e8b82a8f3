"""Where the vocabulary for grammars is loaded from: plain data, so that another process can load it too."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class VocabularyFile:
    """path: of a tokenizer's file. vocab_size: of the model, which may be larger than the tokenizer's. stop_ids: what may
    follow a complete answer."""

    path: str
    vocab_size: int
    stop_ids: tuple[int, ...]

    def __call__(self) -> "LLTokenizer":
        # Most ranks never follow a grammar.
        from llama_core.text.grammar_vocabulary import grammar_vocabulary
        from llama_core.text.registry import load_tokenizer

        return grammar_vocabulary(
            load_tokenizer(Path(self.path), self.vocab_size).padded(self.vocab_size), self.stop_ids
        )
