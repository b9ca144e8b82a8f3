"""Random texts through a tokenizer of each kind: encoded whole, decoded in pieces to the same text, without control tokens.

Small vocabularies, trained here; and those of the files in the environment variable FUZZ_TOKENIZERS, separated by colons.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

from llama_core.text.detokenizer import IncrementalDetokenizer
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizer import TextPart, Tokenizer
from tests.fuzz.file_worker import DEMO
from tests.fuzz.outcome import Outcome
from tests.support.vocabularies import make_family, write_tiktoken

_FAMILIES = ("llama3", "smollm", "llama2_legacy", "metaspace")  # those that do not rewrite text
_MOST_PIECES = 12
# Blocks of characters: their first code point and their number.
_BLOCKS = (
    (0, 128), (0x80, 128), (0x300, 112), (0x370, 144), (0x400, 256), (0x590, 112), (0x600, 256), (0x900, 128), (0xE00, 128),
    (0x1100, 256), (0x2000, 112), (0x2580, 32), (0x3040, 192), (0x4E00, 20_000), (0xAC00, 11_000), (0xFDD0, 32), (0xFE00, 16),
    (0xFF00, 240), (0x1F300, 1000), (0x1F3FB, 5), (0xE0000, 128), (0x10FFF0, 16),
)  # fmt: skip
_WORDS = (
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u2581",
    "\u200d",
    "\ufeff",
    "\ufffd",
    "\0",
    "the ",
    " don't",
    "123",
    "<0x0A>",
    "e\u0301",
)


def tokenizers(folder: Path) -> Mapping[str, Tokenizer]:
    """A tokenizer of each kind, by its name."""
    found = {family: load_tokenizer(make_family(family, folder / family)) for family in _FAMILIES}
    found["tiktoken"] = load_tokenizer(write_tiktoken(folder / "tiktoken" / "tokenizer.model"))
    found["sentencepiece"] = load_tokenizer(DEMO)
    for path in filter(None, os.environ.get("FUZZ_TOKENIZERS", "").split(":")):
        found[Path(path).name] = load_tokenizer(path)
    return found


def random_text(draw: Random, names: list[str]) -> str:
    """Characters of all blocks, words, and names of control tokens, whole and in parts."""
    pieces = []
    for _ in range(draw.randrange(_MOST_PIECES)):
        how = draw.random()
        if how < 0.55:
            first, count = draw.choice(_BLOCKS)
            pieces.append("".join(chr(first + draw.randrange(count)) for _ in range(draw.choice((1, 1, 2, 5)))))
        elif how < 0.85:
            pieces.append(draw.choice(_WORDS))
        else:
            name = draw.choice(names)
            cut = draw.randrange(len(name) + 1)
            pieces.append(draw.choice((name, name[:cut], name[cut:])))
    return "".join(pieces)


def in_pieces(tokenizer: Tokenizer, ids: list[int], draw: Random) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)
    parts, at = [], 0
    while at < len(ids):
        end = at + draw.choice((1, 1, 1, 2, 7))
        parts.append(detokenizer.push(ids[at:end]))
        at = end
    return "".join(parts) + detokenizer.flush()


def known_bytes_of(tokenizer: Tokenizer) -> set[int]:
    """The bytes that the vocabulary has: real ones lack some that no text has had, and leave them out of the ids."""
    raws = map(tokenizer.token_bytes, range(tokenizer.n_words))
    return {raw[0] for raw in raws if len(raw) == 1}


def faults(
    tokenizer: Tokenizer, text: str, draw: Random, known_bytes: set[int], drops_space: bool = False
) -> Iterator[str]:
    """What is wrong with the ids of `text` and their text."""
    ids = tokenizer.encode(text, bos=False, eos=False)
    if any(tokenizer.is_control(each) for each in ids):
        yield "a control token came from text"
    if tokenizer.min_tokens(len(text)) > len(ids):
        yield "min_tokens is more than the number of tokens"
    cut = draw.randrange(len(text) + 1)
    if tokenizer.encode_parts([TextPart(text[:cut], False), TextPart(text[cut:], False)]) != ids:
        yield "the parts of the text have other ids"
    read = in_pieces(tokenizer, ids, draw)
    # SentencePiece writes a space as U+2581. With transformers' Metaspace, a text's own first space is the one that is added.
    spaced = text.replace("\u2581", " ")
    expected = (text, spaced, spaced.removeprefix(" ") if drops_space else spaced)
    if read not in expected and known_bytes.issuperset(text.encode()):
        yield f"decoded in pieces to {read!r}"
    if read != tokenizer.decode(ids):
        yield "decoded whole to another text than in pieces"


def run(cases: int, seed: int) -> Outcome:
    """`cases` texts for each tokenizer."""
    outcome = Outcome("texts")
    with tempfile.TemporaryDirectory() as folder:
        for name, tokenizer in tokenizers(Path(folder)).items():
            names = [*tokenizer.control_texts, "<|eot_id|>", "<|im_start|>", "</s>"]
            draw = Random(f"{seed} {name}")
            known_bytes = known_bytes_of(tokenizer)
            for _ in range(cases):
                text = random_text(draw, names)
                found = None
                try:
                    found = next(faults(tokenizer, text, draw, known_bytes, name == "metaspace"), None)
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
                outcome.case(f"{name}: {'same text' if found is None else 'fault'}")
                if found is not None:
                    outcome.found(f"{name}, {text!r}: {found}")
    return outcome
