"""Hugging Face's tokenizer.json, through the `tokenizers` library, with what the files beside it say of special tokens.

Ids are those of transformers' PreTrainedTokenizerFast.
"""

import codecs
import json
import time
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from llama_core.errors import TokenizerError
from llama_core.text.files import read_json_object
from llama_core.text.hugging_face_files import MAX_TOKENIZER_BYTES, TOKENIZER_FILE, SideFiles
from llama_core.text.hugging_face_steps import check_steps, probes
from llama_core.text.hugging_face_structure import MAX_IDS, Decoding, check_structure, may_shorten
from llama_core.text.library_tokenizer import LibraryTokenizer, build_guarded
from llama_core.text.vocabulary_tokenizer import ControlToken, Vocabulary, is_control_name, warn_left_out

_SAMPLE = "Hello, world 12 \n\té <"  # encoded once, so that a panic of the library stops the start
_MAX_PROBE_S = 0.5  # of processor time, for at most 13,000 characters


class HuggingFaceTokenizer(LibraryTokenizer):
    """A tokenizer.json and the files beside it."""

    def __init__(self, path: str | Path, num_rows: int | None = None) -> None:
        """Load and check the files. Raises TokenizerError that names the file at fault. num_rows: see `_leave_out`."""
        self.path = Path(path)
        side = SideFiles(self.path.parent)
        content = read_json_object(self.path, MAX_TOKENIZER_BYTES)
        try:
            decoding = check_structure(content)
            expressions = check_steps(content)
        except ValueError as error:
            raise TokenizerError(f"{self.path}: {error}") from None
        left_out = frozenset[str]() if num_rows is None else _leave_out(self.path, content, side, num_rows)
        pipeline = build_guarded(str(self.path), lambda: _load(self.path, content, side, left_out))
        added = pipeline.get_added_tokens_decoder()
        _check_ids(self.path, content, added)
        control = _control_tokens(side, added)
        build_guarded(
            str(self.path),
            lambda: super(HuggingFaceTokenizer, self).__init__(
                pipeline,
                _vocabulary(self.path, content, pipeline, side, decoding, control),
                byte_decoding=decoding.byte_decoding,
                leading_space=decoding.leading_space,
                may_shorten_text=may_shorten(content.get("normalizer"))
                or _strips(added)
                or not decoding.has_every_byte,  # then one token may stand for several unknown characters
                control_tokens=control,
                user_tokens=_tokens(added, added.keys() - {token.token_id for token in control.values()}),
            ),
        )
        build_guarded(str(self.path), lambda: self._try(content))
        build_guarded(str(self.path), lambda: self._time(expressions))

    def _try(self, content: Mapping[str, Any]) -> None:
        """A tokenizer that loads must also work: a panic of the library, or a text that changes, stops the start."""
        self.encode_special(_SAMPLE + "".join([*self.control_texts][:8]))
        can_spell = self.min_tokens(1) > 0 and content["model"].get("type") != "Unigram"
        got, expected = self.decode(self.encode(_SAMPLE, bos=False, eos=False)), _SAMPLE
        adds_spaces = '"add_prefix_space": true' in json.dumps(content.get("pre_tokenizer"))
        if adds_spaces and self.byte_decoding == "byte_level":  # whose decoder keeps them
            got, expected = got.replace(" ", ""), expected.replace(" ", "")
        if can_spell and got != expected:
            raise TokenizerError(f"{self.path}: its normalizer, pre_tokenizer and decoder do not give a text back")

    def _time(self, expressions: frozenset[str]) -> None:
        """Raises TokenizerError for expressions that take too long on some text."""
        for text in probes(expressions) if expressions else ():
            began_s = time.thread_time()
            self.encode_special(text)
            if time.thread_time() - began_s > _MAX_PROBE_S:
                raise TokenizerError(f"{self.path}: a pattern takes too long on a text of {len(text)} characters")

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """True for a JSON file by its name."""
        return path.name == TOKENIZER_FILE or path.suffix == ".json"

    def leads_with_space(self, token_id: int) -> bool:
        raw = self.token_bytes(token_id)
        return b" " in raw if self.leading_space == "drop_first_token" else raw.startswith(b" ")


def _leave_out(path: Path, content: Mapping[str, Any], side: SideFiles, num_rows: int) -> frozenset[str]:
    """Takes added tokens past the model's rows out of `content`, and returns their names and those in the files beside it.

    Takes none if an ordinary token lies past them too: then the tokenizer belongs to another model. Raises TokenizerError for
    BOS or EOS.
    """
    vocab, added = content["model"]["vocab"], content.get("added_tokens") or []
    ids = vocab if isinstance(vocab, dict) else {token: token_id for token_id, (token, _) in enumerate(vocab)}
    named = {token.content: token_id for token_id, token in side.added_tokens}
    named |= {token["content"]: token["id"] for token in added}
    past = {name: token_id for name, token_id in named.items() if ids.get(name, token_id) >= num_rows}
    if not all(token in past for token, token_id in ids.items() if token_id >= num_rows):
        return frozenset()
    for name in ("bos_token", "eos_token"):
        if (token := side.special_tokens.get(name, "")) in past:
            what = f"{name} {token[:40]!r} has the id {past[token]}"
            raise TokenizerError(f"{path}: {what}, but the model has only {num_rows} rows")
    warn_left_out(path, [*past], num_rows)
    if isinstance(vocab, dict):
        content["model"]["vocab"] = {token: token_id for token, token_id in vocab.items() if token not in past}
    else:
        del vocab[num_rows:]
    added[:] = [token for token in added if token["content"] not in past]
    return frozenset(past)


def _load(path: Path, content: Mapping[str, Any], side: SideFiles, left_out: Container[str]) -> tokenizers.Tokenizer:
    """The pipeline, with the added and special tokens of the side files but those left out."""
    if left_out:
        pipeline = tokenizers.Tokenizer.from_str(json.dumps(content))
    else:
        pipeline = tokenizers.Tokenizer.from_buffer(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    pipeline.no_truncation()
    pipeline.no_padding()
    known = {repr(token) for token in pipeline.get_added_tokens_decoder().values()}
    new = [token for _, token in side.added_tokens if repr(token) not in known and token.content not in left_out]
    if new:
        pipeline.add_tokens(new)
    # A special token that is not in the vocabulary would get an id that the model does not have.
    special = [*side.special_tokens.values(), *side.further_special_tokens]
    flags = {token.content: token for token in pipeline.get_added_tokens_decoder().values()}
    pipeline.add_special_tokens(
        [
            flags.get(content) or tokenizers.AddedToken(content, normalized=False)
            for content in dict.fromkeys(special)
            if pipeline.token_to_id(content) is not None and not (content in flags and flags[content].special)
        ]
    )
    return pipeline


def _check_ids(path: Path, content: Mapping[str, Any], added: Mapping[int, tokenizers.AddedToken]) -> None:
    """Raises TokenizerError where the library gives an added token another id than the file does."""
    given = content.get("added_tokens")
    for token in given if isinstance(given, list) else []:
        token_id = token["id"]
        if token_id not in added or added[token_id].content != token["content"]:
            name = token["content"][:40]
            raise TokenizerError(f"{path}: added_tokens gives {name!r} the id {token_id}, which is not its own")


def _control_tokens(side: SideFiles, added: Mapping[int, tokenizers.AddedToken]) -> dict[str, ControlToken]:
    """Published files (DeepSeek-R1-Distill-Qwen) do not mark every turn's mark as special."""
    named = {*side.special_tokens.values(), *side.further_special_tokens}
    ids = (i for i, token in added.items() if token.special or token.content in named or is_control_name(token.content))
    return _tokens(added, ids)


def _tokens(added: Mapping[int, tokenizers.AddedToken], ids: Iterable[int]) -> dict[str, ControlToken]:
    return {added[i].content: ControlToken(i, added[i].lstrip, added[i].rstrip) for i in ids}


def _strips(added: Mapping[int, tokenizers.AddedToken]) -> bool:
    """Whether a token takes white space away, so that a text may get shorter."""
    return any(token.lstrip or token.rstrip for token in added.values())


def _vocabulary(
    path: Path,
    content: Mapping[str, Any],
    pipeline: tokenizers.Tokenizer,
    side: SideFiles,
    decoding: Decoding,
    control: Mapping[str, ControlToken],
) -> Vocabulary:
    vocab = pipeline.get_vocab(with_added_tokens=True)
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
    return Vocabulary(
        raws=raws,
        control_texts={text: token.token_id for text, token in control.items()},
        bos_id=bos_id,
        eos_id=eos_id,
        adds_bos=prefix[:1] == [bos_id] if adds_bos is None else adds_bos,
        stop_ids=frozenset(stops),
        unknown_id=None if decoding.has_every_byte else _unknown_id(content["model"], vocab),
    )


def _unknown_id(model: Mapping[str, Any], vocab: Mapping[str, int]) -> int | None:
    """The id of characters that the vocabulary lacks."""
    unknown_id: int | None = model.get("unk_id")
    return vocab.get(str(model.get("unk_token"))) if unknown_id is None else unknown_id


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
