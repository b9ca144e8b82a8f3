"""A tokenizer's ids against the rows of the model: padded rows, added tokens without a row, tokenizers of other models."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.args import ServerArgs
from deployments.engine.service import LlamaService
from llama_core.errors import ConfigError, InvalidParameter, TokenizerError
from llama_core.grammar.vocabulary import load_vocabulary
from llama_core.scheduling.request import check_prompt
from llama_core.text.tokenizers.gguf_vocabulary import CONTROL, USER_DEFINED
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool
from tests.support.gguf_models import (
    DIM,
    VOCABULARY,
    byte_level_fields,
    random_tensors,
    sentencepiece_fields,
    write_model,
)
from tests.support.hugging_face import CONFIGS, random_weights, read, write
from tests.support.vocabularies import FAMILIES, make_family

NAMES = ("<pad>", "<extra>")  # without a row in the models below


def service(checkpoint: Path, **args: Any) -> LlamaService:
    return LlamaService(ServerArgs(ckpt_dir=str(checkpoint), **args), FakeGroupPool(FakeGroup))


def hugging_face(folder: Path, num_rows: int) -> Path:
    config = CONFIGS["llama2"] | {"vocab_size": num_rows}
    return write(folder, config, random_weights(read(config, vocab_size=1)))


def in_added_tokens(folder: Path, first: int) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    flags = content["added_tokens"][0]
    content["added_tokens"] += [flags | {"id": first + i, "content": name} for i, name in enumerate(NAMES)]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def write_hugging_face(folder: Path, change: Callable[[Path, int], None]) -> tuple[Path, int]:
    """A folder whose tokenizer has NAMES past the rows, and the number of rows."""
    num_rows = FAMILIES["llama3"]()[0].get_vocab_size()
    make_family("llama3", hugging_face(folder, num_rows))
    change(folder, num_rows)
    stops = {"eos_token_id": [num_rows - 1, num_rows]}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    return folder, num_rows


def write_gguf(folder: Path, fields: dict[str, Any], **more: Any) -> tuple[Path, int]:
    num_rows = len(fields["tokens"])
    fields = fields | {
        "tokens": [*fields["tokens"], *NAMES],
        "token_type": [*fields["token_type"], CONTROL, USER_DEFINED],
    }
    if "scores" in fields:
        fields["scores"] = [*fields["scores"], 0.0, 0.0]
    tensors = random_tensors("llama")
    grown = {
        name: tensors[name].repeat(-(-num_rows // VOCABULARY), 0)[:num_rows] for name in tensors if "blk" not in name
    }
    grown["output_norm.weight"] = tensors["output_norm.weight"]
    assert grown["output.weight"].shape == (num_rows, DIM)
    plain = {f"tokenizer.ggml.{name}": value for name, value in (fields | more).items()}
    return write_model(folder, plain=plain, more=grown), num_rows


CASES: dict[str, Callable[[Path], tuple[Path, int]]] = {
    "added_tokens": lambda folder: write_hugging_face(folder, in_added_tokens),
    "byte-level GGUF": lambda folder: write_gguf(
        folder, byte_level_fields("llama3"), eot_token_id=len(byte_level_fields("llama3")["tokens"])
    ),
    "SentencePiece GGUF": lambda folder: write_gguf(folder, sentencepiece_fields()),
}


@pytest.mark.parametrize("case", CASES)
def test_added_tokens_without_a_row_are_left_out_with_a_warning(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, num_rows = CASES[case](tmp_path)
    with caplog.at_level(logging.WARNING):
        engine = service(checkpoint)
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert told and f"the model's {num_rows} rows" in told[0] and "'<pad>', '<extra>'" in told[0]
    tokenizer = engine.tokenizer
    assert tokenizer.n_words == tokenizer.vocab_size == engine.config.vocab_size == num_rows
    assert max(engine.config.stop_ids) < num_rows and max(tokenizer.stop_ids) < num_rows
    text = "the fox<pad><extra>the dog"
    for ids in (tokenizer.encode(text, bos=True, eos=True), tokenizer.encode_special(text, bos=True)):
        assert max(ids) < num_rows
    assert tokenizer.decode(tokenizer.encode(text, bos=False, eos=False)).strip() == text
    with pytest.raises(InvalidParameter):
        check_prompt([num_rows], tokenizer.n_words, 64)
    vocabulary = load_vocabulary(str(engine.config.tokenizer_path), num_rows, engine.config.stop_ids)
    assert vocabulary.vocab_size == num_rows


def test_bos_or_eos_without_a_row_stops_the_start(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", FAMILIES["llama3"]()[0].get_vocab_size() - 1)
    path = make_family("llama3", folder)
    with pytest.raises(
        TokenizerError, match=r"eos_token '<\|eot_id\|>' has the id 579, but the model has only 579 rows"
    ):
        service(folder)
    assert path.exists()
    fields = byte_level_fields("llama3")
    model, num_rows = write_gguf(tmp_path / "gguf", fields, eos_token_id=len(fields["tokens"]))
    with pytest.raises(TokenizerError, match=rf"eos_token_id is {num_rows}, but the model has only {num_rows} rows"):
        service(model)


def test_ordinary_tokens_without_a_row_belong_to_another_model(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path, 500)
    make_family("llama3", folder)
    with pytest.raises(ConfigError, match="vocab_size is 500, but the tokenizer has 580 tokens"):
        service(folder)


def test_a_tokenizer_beside_its_weights_may_have_ids_for_a_small_part_of_the_rows(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "model", 1280)
    path = make_family("llama3", folder)
    engine = service(folder)
    assert (engine.tokenizer.n_words, engine.tokenizer.vocab_size) == (580, 1280)
    shutil.copytree(folder, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"has 580 tokens, but .* has 1,280 rows"):
        service(folder, tokenizer_path=str(tmp_path / "other"))
    assert service(folder, tokenizer_path=str(path)).tokenizer.n_words == 580
