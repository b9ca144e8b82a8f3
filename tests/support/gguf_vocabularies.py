"""GGUF files without weights, whose vocabularies are those of small tokenizers."""

import json
from pathlib import Path
from typing import Any

import gguf
import sentencepiece

from llama_core.text.tokenizers.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from tests.conftest import GOLDEN
from tests.support.vocabularies import FAMILIES

PRE_OF_FAMILY = {"llama3": "llama-bpe", "smollm": "smollm", "qwen": "qwen2"}
MODEL = GOLDEN / "mp1" / "tokenizer.model"
PIECES = sentencepiece.SentencePieceProcessor(model_file=str(MODEL))


def write_vocabulary(path: Path, **fields: Any) -> Path:
    """A GGUF file without weights. fields: the keys behind tokenizer.ggml."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_fields(family: str) -> dict[str, Any]:
    tokenizer, config = FAMILIES[family]()
    content = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    kinds = [NORMAL] * len(vocab)
    for token_id, token in added.items():
        kinds[token_id] = CONTROL if token.special else USER_DEFINED
    return {
        "model": "gpt2",
        "pre": PRE_OF_FAMILY[family],
        "tokens": sorted(vocab, key=lambda token: vocab[token]),
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "eos_token_id": vocab[config["eos_token"]],
    } | ({"bos_token_id": vocab[config["bos_token"]]} if config["bos_token"] else {})


def sentencepiece_fields() -> dict[str, Any]:
    ids = range(PIECES.vocab_size())
    kinds = [
        UNKNOWN if PIECES.is_unknown(i) else CONTROL if PIECES.is_control(i) else BYTE if PIECES.is_byte(i) else NORMAL
        for i in ids
    ]
    return {
        "model": "llama",
        "tokens": [PIECES.id_to_piece(i) for i in ids],
        "scores": [PIECES.get_score(i) for i in ids],
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
