"""Hugging Face's tokenizer.json, through the `tokenizers` library, with what the files beside it say of special tokens.

Ids are those of transformers' PreTrainedTokenizerFast.
"""

import codecs
import json
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Final

import tokenizers

from llama_core.errors import InvalidRequest, TokenizerError
from llama_core.text.tokenizers.files import build_guarded, read_bounded
from llama_core.text.tokenizers.gguf_tokenizer import PRE_TOKENIZERS
from llama_core.text.tokenizers.hugging_face_files import (
    Decoding,
    SideFiles,
    as_json,
    expressions_of,
    may_shorten,
    read_decoding,
)
from llama_core.text.tokenizers.library_tokenizer import MAX_ADDED, LibraryTokenizer, as_special
from llama_core.text.tokenizers.vocabulary_tokenizer import ControlToken, Vocabulary, is_control_name, warn_left_out

MAX_IDS: Final = 2**24
_MAX_BYTES: Final = 256 * 2**20
# Encoded at each load: a panic of the library, or a normalizer that makes a character endless, stops the start.
_SAMPLE: Final = "Hello, world 12 \n\té " + "".join(map(chr, range(0x21, 0x7F)))
_PROBE_CHARS: Final = 100_000
_MAX_PROBES: Final = 16
_REPEATED: Final = re.compile(r"(?<!\\)(\w)\]?[*+?{]")  # a character before a quantifier
# The expressions of the families, whose cost is known.
_KNOWN: Final = frozenset(pattern for each in PRE_TOKENIZERS.values() for pattern in each.patterns)


class HuggingFaceTokenizer(LibraryTokenizer):
    """A tokenizer.json and the files beside it."""

    def __init__(self, path: str | Path, num_rows: int | None = None) -> None:
        """Raises TokenizerError that names the file at fault. num_rows: see `_without_rows`."""
        self.path = Path(path)
        build_guarded(str(self.path), lambda: self._load(num_rows))

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """True for a JSON file by its name."""
        return path.suffix == ".json"

    def leads_with_space(self, token_id: int) -> bool:
        raw = self.token_bytes(token_id)
        return b" " in raw if self.leading_space == "drop_first_token" else raw.startswith(b" ")

    def probe(self) -> None:
        """Encodes texts that take long with expressions which try many ways to match. Raises TokenizerError where the library
        gives up; may not end."""
        steps = [as_json(self._pipeline.normalizer), as_json(self._pipeline.pre_tokenizer)]
        expressions = sorted({*expressions_of(steps)} - _KNOWN)
        if not expressions:
            return
        repeated = dict.fromkeys(char for each in expressions for char in _REPEATED.findall(each))
        # The library tries no match on a text that lacks a character which every match has.
        written = "".join(dict.fromkeys(char for each in expressions for char in each if char.isalnum()))
        for char in dict.fromkeys([*" a1.\n", *repeated][:_MAX_PROBES]):
            try:
                self.encode_special(char * _PROBE_CHARS + "!" + written)
            except InvalidRequest as error:
                what = f"{_PROBE_CHARS:,} times {char!r}"
                raise TokenizerError(f"{self.path}: its patterns cannot split {what}: {error.message}") from None

    def _load(self, num_rows: int | None) -> None:
        side = SideFiles(self.path.parent)
        pipeline = tokenizers.Tokenizer.from_buffer(read_bounded(self.path, _MAX_BYTES).removeprefix(codecs.BOM_UTF8))
        kind = type(pipeline.model).__name__
        if kind not in ("BPE", "Unigram"):
            raise ValueError(f"model.type is {kind}: only BPE and Unigram are supported")
        if getattr(pipeline.model, "dropout", None):
            raise ValueError("model.dropout is not supported: the same text would get other ids each time")
        left_out: Container[str] = ()
        if num_rows is not None:
            pipeline, left_out = _without_rows(self.path, pipeline, side, num_rows)
        _add_tokens(pipeline, side, left_out)
        added = pipeline.get_added_tokens_decoder()
        if len(added) > MAX_ADDED:
            raise ValueError(f"has {len(added)} added tokens, more than {MAX_ADDED}")
        control = _control_tokens(side, added)
        # The library looks for a normalized one in the normalized text: with Llama's normalizer, it is found only after spaces.
        pipeline.add_special_tokens(
            [
                as_special(added[token.token_id], normalized=False)
                for token in control.values()
                if added[token.token_id].normalized
            ]
        )
        vocab = pipeline.get_vocab(with_added_tokens=True)
        decoding = read_decoding(pipeline, vocab)
        super().__init__(
            pipeline,
            _vocabulary(self.path, pipeline, vocab, side, decoding, control),
            byte_decoding=decoding.byte_decoding,
            leading_space=decoding.leading_space,
            may_shorten_text=may_shorten(as_json(pipeline.normalizer))
            or any(token.lstrip or token.rstrip for token in added.values())
            or not decoding.has_every_byte,  # then one token may stand for several unknown characters
            control_tokens=control,
            user_tokens=_tokens(added, added.keys() - {token.token_id for token in control.values()}),
        )
        self._try(kind)

    def _try(self, kind: str) -> None:
        """A tokenizer that loads must also work: a panic of the library, or a text that changes, stops the start."""
        self.encode_special(_SAMPLE + "".join([*self.control_texts][:8]))
        got, expected = self.decode(self.encode(_SAMPLE, bos=False, eos=False)), _SAMPLE
        if '"add_prefix_space": true' in json.dumps(as_json(self._pipeline.pre_tokenizer)):
            got, expected = got.replace(" ", ""), expected.replace(" ", "")  # byte-level decoders keep these spaces
        if got != expected and self.min_tokens(1) > 0 and kind != "Unigram":
            raise ValueError("its normalizer, pre_tokenizer and decoder do not give a text back")


def _without_rows(
    path: Path, pipeline: tokenizers.Tokenizer, side: SideFiles, num_rows: int
) -> tuple[tokenizers.Tokenizer, Container[str]]:
    """The pipeline without added tokens past the model's rows, and their names, also of those in the files beside it.

    Leaves none out if an ordinary token lies past them too: then the tokenizer belongs to another model. Raises TokenizerError
    for BOS or EOS.
    """
    ids = pipeline.get_vocab(with_added_tokens=False)
    named = {token.content: token_id for token_id, token in side.added_tokens.items()}
    named |= {token.content: token_id for token_id, token in pipeline.get_added_tokens_decoder().items()}
    past = {name: token_id for name, token_id in named.items() if ids.get(name, token_id) >= num_rows}
    if not past or any(token_id >= num_rows and token not in past for token, token_id in ids.items()):
        return pipeline, ()
    for name in ("bos_token", "eos_token"):
        if (token := side.special_tokens.get(name, "")) in past:
            what = f"{name} {token[:40]!r} has the id {past[token]}"
            raise TokenizerError(f"{path}: {what}, but the model has only {num_rows} rows")
    warn_left_out(path, [*past], num_rows)
    content = json.loads(pipeline.to_str())
    vocab = content["model"]["vocab"]
    is_list = isinstance(vocab, list)
    content["model"]["vocab"] = vocab[:num_rows] if is_list else {t: i for t, i in vocab.items() if t not in past}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in past]
    return tokenizers.Tokenizer.from_str(json.dumps(content)), past


def _add_tokens(pipeline: tokenizers.Tokenizer, side: SideFiles, left_out: Container[str]) -> None:
    """Adds the added and special tokens of the side files but those left out."""
    pipeline.no_truncation()
    pipeline.no_padding()
    known = {repr(token) for token in pipeline.get_added_tokens_decoder().values()}
    new = [t for t in side.added_tokens.values() if repr(t) not in known and t.content not in left_out]
    if new:
        pipeline.add_tokens(new)  # one call: the library builds its search anew after each
    # A special token that is not in the vocabulary would get an id that the model does not have.
    special = dict.fromkeys([*side.special_tokens.values(), *side.further_special_tokens])
    flags = {token.content: token for token in pipeline.get_added_tokens_decoder().values()}
    pipeline.add_special_tokens(
        [
            flags.get(content) or tokenizers.AddedToken(content, normalized=False)
            for content in special
            if pipeline.token_to_id(content) is not None and not (content in flags and flags[content].special)
        ]
    )


def _control_tokens(side: SideFiles, added: Mapping[int, tokenizers.AddedToken]) -> dict[str, ControlToken]:
    """Published files (DeepSeek-R1-Distill-Qwen) do not mark every turn's mark as special."""
    named = {*side.special_tokens.values(), *side.further_special_tokens}
    ids = (i for i, token in added.items() if token.special or token.content in named or is_control_name(token.content))
    return _tokens(added, ids)


def _tokens(added: Mapping[int, tokenizers.AddedToken], ids: Iterable[int]) -> dict[str, ControlToken]:
    return {added[i].content: ControlToken(i, added[i].lstrip, added[i].rstrip) for i in ids}


def _vocabulary(
    path: Path,
    pipeline: tokenizers.Tokenizer,
    vocab: Mapping[str, int],
    side: SideFiles,
    decoding: Decoding,
    control: Mapping[str, ControlToken],
) -> Vocabulary:
    num_ids = max(vocab.values()) + 1
    if num_ids > MAX_IDS:
        raise TokenizerError(f"{path}: has the id {num_ids - 1}, more than {MAX_IDS} ids")
    control_ids = {token.token_id for token in control.values()}
    raws = [b""] * num_ids
    for token, token_id in vocab.items():
        if token_id not in control_ids:
            raws[token_id] = decoding.raw(token)
    bos_id = _named_id(path, "bos_token", side, vocab)
    stops = [token_id for token_id in side.token_ids("eos_token_id") if token_id < num_ids]
    eos_id = _named_id(path, "eos_token", side, vocab)
    if eos_id is None:
        if not stops:
            raise TokenizerError(f"{path}: no file beside it has an eos_token: name it in tokenizer_config.json")
        eos_id = stops[0]
    prefix = pipeline.encode("", add_special_tokens=True).ids
    adds_bos = side.adds_bos()
    # No vocabulary has the last character of Unicode.
    unknown = [] if decoding.has_every_byte else pipeline.model.tokenize("\U0010ffff")
    return Vocabulary(
        raws=raws,
        control_texts={text: token.token_id for text, token in control.items()},
        bos_id=bos_id,
        eos_id=eos_id,
        adds_bos=prefix[:1] == [bos_id] if adds_bos is None else adds_bos,
        stop_ids=frozenset(stops),
        unknown_id=unknown[0].id if unknown else None,
        appended=_appended(pipeline),
    )


def _appended(pipeline: tokenizers.Tokenizer) -> tuple[int, ...]:
    """What the post-processor writes behind a text. transformers 5 reads no add_eos_token where there is one."""
    whole = pipeline.encode("a", add_special_tokens=True)
    end = max(
        (at for at, is_special in enumerate(whole.special_tokens_mask, 1) if not is_special), default=len(whole.ids)
    )
    return tuple(whole.ids[end:])


def _named_id(path: Path, name: str, side: SideFiles, vocab: Mapping[str, int]) -> int | None:
    content = side.special_tokens.get(name)
    if content is None:
        ids = side.token_ids(f"{name}_id") if not side.special_tokens else []
        return ids[0] if ids and ids[0] in vocab.values() else None
    if content not in vocab:
        raise TokenizerError(
            f"{path}: {name} is {content[:40]!r} in the files beside it, which is not in the vocabulary"
        )
    return vocab[content]
