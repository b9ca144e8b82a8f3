"""The vocabulary inside a .gguf file: byte-level BPE (`gpt2`) or SentencePiece's BPE (`llama`).

Builds the tokenizer in memory from `tokenizer.ggml.*`. A kind of vocabulary, or a pre-tokenizer, that is not known is refused
by its name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from llama_core.checkpoint.gguf_file import GgufFile
from llama_core.checkpoint.gguf_model import refuse_later_part
from llama_core.errors import CheckpointError, TokenizerError
from llama_core.text.byte_level import bytes_of, has_every_byte
from llama_core.text.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer
from llama_core.text.gguf_sentencepiece import GgufSentencePiece
from llama_core.text.gguf_vocabulary import CONTROL, UNUSED, USER_DEFINED, GgufVocabulary
from llama_core.text.library_tokenizer import LibraryTokenizer, build_guarded
from llama_core.text.tokenizer import Tokenizer
from llama_core.text.vocabulary_tokenizer import ControlToken, Vocabulary

_MAGIC: Final = b"GGUF"
_KINDS: Final = ("gpt2", "llama")


class GgufFormat:
    """The entry of `registry.TOKENIZERS`: a GGUF file holds one of two kinds of tokenizer."""

    def recognizes(self, path: Path) -> bool:
        """Whether the file begins as a GGUF file."""
        try:
            with path.open("rb") as file:
                return file.read(len(_MAGIC)) == _MAGIC
        except OSError:
            return False

    def __call__(self, path: Path, num_rows: int | None = None) -> Tokenizer:
        return load_gguf_tokenizer(path, num_rows)


GGUF: Final = GgufFormat()


def load_gguf_tokenizer(path: Path, num_rows: int | None = None) -> Tokenizer:
    """The vocabulary in the file. Raises TokenizerError that names the file and the key. num_rows: as in `GgufVocabulary`."""
    try:
        refuse_later_part(path, "tokenizer_path")
        return _load(path, GgufFile(path).metadata, num_rows)
    except CheckpointError as error:
        raise TokenizerError(error.message) from None


def _load(path: Path, metadata: Mapping[str, Any], num_rows: int | None) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        known = " and ".join(_KINDS)
        raise TokenizerError(f"{path}: tokenizer.ggml.model is {str(kind)[:40]!r}: only {known} are supported")
    vocabulary = GgufVocabulary(path, metadata, num_rows)
    if kind == "llama":
        return GgufSentencePiece(vocabulary)
    return build_guarded(str(path), lambda: _byte_level(path, metadata, vocabulary))


def _byte_level(path: Path, metadata: Mapping[str, Any], given: GgufVocabulary) -> LibraryTokenizer:
    pre_tokenizer = _pre_tokenizer(path, metadata)
    merges = _merges(path, metadata)
    backend = models.BPE(
        vocab={text: token_id for token_id, text in enumerate(given.texts)},
        merges=merges,
        ignore_merges=pre_tokenizer.ignore_merges,
    )
    pipeline = tokenizers.Tokenizer(backend)
    splits = [pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in pre_tokenizer.patterns]
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    pipeline.decoder = decoders.ByteLevel()
    added = sorted(given.control_names.keys() | given.user_tokens.values())
    pipeline.add_tokens(  # one call: the library builds its search anew after each
        [tokenizers.AddedToken(given.texts[i], special=i in given.control_names, normalized=False) for i in added]
    )
    return LibraryTokenizer(
        pipeline,
        Vocabulary(
            raws=[_raw(given, token_id) for token_id in range(len(given.texts))],
            control_texts=given.control_texts,
            bos_id=given.bos_id,
            eos_id=given.eos_id,
            adds_bos=given.adds_bos(pre_tokenizer.adds_bos),
            stop_ids=given.stop_ids,
        ),
        byte_decoding="byte_level",
        may_shorten_text=_lacks_bytes(given),
        user_tokens={text: ControlToken(token_id) for text, token_id in given.user_tokens.items()},
    )


def _raw(given: GgufVocabulary, token_id: int) -> bytes:
    if token_id in given.control_names or given.kinds[token_id] == UNUSED:
        return b""
    text = given.texts[token_id]
    raw = None if given.kinds[token_id] == USER_DEFINED else bytes_of(text)
    return text.encode() if raw is None else raw


def _pre_tokenizer(path: Path, metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise TokenizerError(f"{path}: tokenizer.ggml.pre names the unknown pre-tokenizer {str(name)[:40]!r}")
    return PRE_TOKENIZERS[name]


def _merges(path: Path, metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not merges:
        raise TokenizerError(f"{path}: tokenizer.ggml.merges is missing")
    pairs = []
    for index, merge in enumerate(merges):
        # A part may begin with a space in vocabularies that are not byte-level: the separator is not the first character.
        at = merge.find(" ", 1) if isinstance(merge, str) else -1
        if at < 1 or at == len(merge) - 1:
            raise TokenizerError(f"{path}: tokenizer.ggml.merges[{index}] is not two tokens: {str(merge)[:40]!r}")
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs


def _lacks_bytes(given: GgufVocabulary) -> bool:
    known = {text for text, kind in zip(given.texts, given.kinds, strict=True) if kind != CONTROL}
    try:
        return not has_every_byte(known)
    except ValueError as error:
        raise given.error("tokens", str(error)) from None
