"""The vocabulary inside a .gguf file: byte-level BPE (`gpt2`) or SentencePiece's BPE (`llama`).

Builds the tokenizer in memory from `tokenizer.ggml.*`. A kind of vocabulary, or a pre-tokenizer, that is not known is refused
by its name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from llama_core.errors import CheckpointError, TokenizerError
from llama_core.files.gguf.file import GgufFile, is_gguf
from llama_core.files.gguf.model import refuse_later_part
from llama_core.text.tokenizers.files import build_guarded
from llama_core.text.tokenizers.gguf_vocabulary import CONTROL, UNUSED, USER_DEFINED, GgufSentencePiece, GgufVocabulary
from llama_core.text.tokenizers.library_tokenizer import LibraryTokenizer, bytes_of, has_every_byte
from llama_core.text.tokenizers.tokenizer import Tokenizer
from llama_core.text.tokenizers.vocabulary_tokenizer import ControlToken, Vocabulary

# Of `tokenizer.ggml.pre`, by llama.cpp's names. Each pattern is that of the models' own tokenizer.json; llama.cpp's expressions
# for the same names (src/llama-vocab.cpp) split alike.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = rf"{_TEKKEN_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Letters with case of the Unicode version that DeepSeek LLM was trained with.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-"
    "\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e"
    "\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """patterns: each splits the pieces that the ones before it left. ignore_merges: a piece that is a token stays whole.
    adds_bos: if the file does not say."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion"), _PLAIN_GPT2),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), PreTokenizer((_QWEN2,))),
    "qwen35": PreTokenizer((_QWEN35,)),
    **dict.fromkeys(("tekken", "mistral-bpe"), PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_PUNCTUATION}]+", r"\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
}

_KINDS: Final = ("gpt2", "llama")


class GgufFormat:
    """The entry of `registry.TOKENIZERS`: a GGUF file holds one of two kinds of tokenizer."""

    recognizes = staticmethod(is_gguf)

    def __call__(self, path: Path, num_rows: int | None = None) -> Tokenizer:
        """The vocabulary in the file. Raises TokenizerError that names the file and the key. num_rows: as in
        `GgufVocabulary`."""
        try:
            refuse_later_part(path, "tokenizer_path")
            return _load(path, GgufFile(path).metadata, num_rows)
        except CheckpointError as error:
            raise TokenizerError(error.message) from None


GGUF: Final = GgufFormat()


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
            appended=(given.eos_id,) if given.flag("add_eos_token", False) else (),
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
