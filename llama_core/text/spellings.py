"""How a tokenizer writes words, for words that must not be generated."""

from collections.abc import Collection

from llama_core.text.tokenizers.tokenizer import Tokenizer


def spellings(words: Collection[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that write each word: at the beginning of a text, after a space, and inside a line."""
    found: dict[tuple[int, ...], None] = {}
    if not words:
        return ()
    newline = tokenizer.encode("\n", bos=False, eos=False)
    for word in words:
        after_newline = tokenizer.encode("\n" + word, bos=False, eos=False)
        for ids in (
            tokenizer.encode(word, bos=False, eos=False),
            tokenizer.encode(" " + word, bos=False, eos=False),
            after_newline[len(newline) :] if after_newline[: len(newline)] == newline else [],
        ):
            if ids:
                found[tuple(ids)] = None
    return tuple(found)
