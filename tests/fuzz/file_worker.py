"""Loads damaged files in a process of its own, because they may crash it. `files.py` starts it."""

import contextlib
import hashlib
import os
import resource
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from llama_core.backends.rotary import rotary_table
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import CheckpointError, ConfigError, LlamaError, SpecialTags, TokenizerError
from llama_core.files.manifest import Manifest
from llama_core.model.share import RankShare
from llama_core.text.detokenizer import IncrementalDetokenizer
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizers.tokenizer import TextPart
from tests.support import gguf_models
from tests.support.hugging_face import CONFIGS, in_hugging_faces_layout, random_weights, read
from tests.support.hugging_face import VOCAB_SIZE as HF_VOCAB_SIZE
from tests.support.programs import REPOSITORY
from tests.support.rank_weights import rank_weights

DEMO = REPOSITORY / "demo"
FOLDER = "hf"  # of the damaged Hugging Face folder
MOST_MEMORY_BYTES = 3 * 2**30  # beyond the memory that is mapped before the first file
# Python's audit events that no damaged file may cause.
_DEEDS = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.dlopen", "pty.", "webbrowser.", "urllib.", "smtplib.")
_HARMLESS = ("os.listdir", "os.scandir", "os.fwalk", "os.walk", "os.stat")
_TEXTS = ("Hello there, how are you?", "naïve 🦙 \u2581 x", "", " ", "a" * 300, "\n\t\x00", "日本語")

_LONG_TEXTS = (
    *("a" * 2000 + "!", "x" * 900 + " ", " " * 2000 + ".", "1" * 900 + "\n"),
    *("ab " * 300, "ae" * 300, "\ufb01\uff21" * 100),
)

_EXPECTED: dict[str, tuple[type[LlamaError], ...]] = {
    "tokenizer": (TokenizerError,),
    "tokenizer_json": (TokenizerError, ConfigError),
    "gguf_vocabulary": (TokenizerError, ConfigError),
}

_deeds: list[str] = []
_is_loading = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _is_loading:
        return
    if event == "subprocess.Popen" and "llama_core.text.tokenizers.probe" in str(arguments[1]):
        return
    writes = event == "open" and isinstance(arguments[1], str) and any(letter in arguments[1] for letter in "wax+")
    if writes or (event.startswith(_DEEDS) and not event.startswith(_HARMLESS)):
        _deeds.append(f"{event} {arguments!r}"[:300])


def load_checkpoint(directory: Path, vocab_size: int) -> str:
    """A digest of all weights, as one rank would hold them."""
    checkpoint = open_checkpoint(directory)
    config = checkpoint.model_config(vocab_size)
    config.check_world_size(2)
    reader = checkpoint.open_weights(config)
    reader.verify_checksums(0, 1)
    share = RankShare.of(config, 0, 1)
    return _digest(dict(rank_weights(reader, config, share, reader.dtype)))


def use_folder(folder: Path, *, is_config: bool) -> str | None:
    """Load a Hugging Face folder, and compare the weights with what the safetensors library reads. A fault as text, or None."""
    checkpoint = open_checkpoint(folder)
    checkpoint.num_shards()
    config = checkpoint.model_config(HF_VOCAB_SIZE)
    _ = checkpoint.stop_ids
    reader = checkpoint.open_weights(config)
    share, cpu = RankShare.of(config, 0, 1), torch.device("cpu")
    weights = dict(rank_weights(reader, config, share, reader.dtype))
    if is_config:
        tables = (rotary_table(angles, config.head_dim, 64, cpu) for angles in config.angles)
        is_finite = all(bool(table.isfinite().all()) for table in tables)
        return None if is_finite else "a config.json with rotary frequencies that are not finite was loaded"
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        try:
            stored |= load_file(file)
        except SafetensorError as error:
            return f"the safetensors library refuses {file.name}, which was loaded: {error}"
    for name, values in in_hugging_faces_layout(weights, config).items():
        if name not in stored or not torch.equal(stored[name].to(values.dtype), values):
            return f"{name} was loaded with other values than the safetensors library reads"
    manifest = Manifest.find(folder)
    assert manifest is not None
    try:
        manifest.verify(checkpoint.files)
    except CheckpointError:
        return None
    return None if _digest(weights) == _undamaged_folder() else "SHA256SUMS does not notice other weights"


@cache
def _undamaged() -> tuple[int, str]:
    """Of the demo model: the tokens of its tokenizer, and the digest of its weights."""
    vocab_size = load_tokenizer(DEMO / "tokenizer.model").n_words
    return vocab_size, load_checkpoint(DEMO, vocab_size)


@cache
def _undamaged_folder() -> str:
    return _digest(random_weights(read(CONFIGS["qwen3"])))


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def use_tokenizer(path: Path) -> str | None:
    """Load any kind of tokenizer and use it on texts that take long with bad expressions. A fault as text, or None."""
    tokenizer = load_tokenizer(path)
    ids = list(range(min(tokenizer.n_words, 1000)))
    for text in (*_TEXTS, *_LONG_TEXTS):
        with contextlib.suppress(SpecialTags):  # where the file calls a plain character a control token
            found = tokenizer.encode(text, bos=True, eos=False)
            tokenizer.encode_parts([TextPart(text[:5], True), TextPart(text[5:], False)])
            if len(found) > 1000 + 200 * len(text):
                return f"a text of {len(text)} characters has {len(found)} tokens"
            ids += found
    detokenizer = IncrementalDetokenizer(tokenizer)
    streamed = "".join([detokenizer.push([each]) for each in ids]) + detokenizer.flush()
    if streamed != tokenizer.decode(ids):
        return "the stream has another text than decode"
    return None


def judge(kind: str, directory: Path, is_rewritten: bool) -> tuple[str, str | None]:
    vocab_size, undamaged = _undamaged()
    fault = None
    try:
        if kind in ("tokenizer", "tokenizer_json", "gguf_vocabulary"):
            fault = use_tokenizer(directory / "tokenizer.model" if kind == "tokenizer" else directory)
        elif kind in ("safetensors", "config"):
            fault = use_folder(directory / FOLDER, is_config=kind == "config")
        elif kind == "gguf":
            load_checkpoint(directory / "m.gguf", gguf_models.VOCABULARY)
        elif load_checkpoint(directory, vocab_size) != undamaged and kind == "checkpoint" and not is_rewritten:
            fault = "damaged weights were loaded"
    except LlamaError as error:
        expected = _EXPECTED.get(kind, (CheckpointError, ConfigError))
        if not isinstance(error, expected):
            return type(error).__name__, f"{type(error).__name__} is no error about files: {error.message[:300]}"
        if len(error.message) > 2000:
            return type(error).__name__, f"a message of {len(error.message)} characters: {error.message[:300]}"
        if str(directory) not in error.message and error.param is None:
            return type(error).__name__, f"the file is not named: {error.message[:300]}"
        return type(error).__name__, None
    except BaseException as error:
        return "escaped", f"{type(error).__name__}: {str(error)[:300]}"
    return "loaded", fault


def begin() -> None:
    """Limit this process, which must do nothing beside loading."""
    os.chdir(REPOSITORY)
    sys.dont_write_bytecode = True  # a file that it writes is a finding
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    _undamaged()
    _undamaged_folder()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MEMORY_BYTES, resource.RLIM_INFINITY))
    sys.addaudithook(_audit)


def load(kind: str, directory: Path, is_rewritten: bool) -> tuple[str, str | None]:
    """The outcome, and the finding if there is one. is_rewritten: checksums match the changed bytes."""
    global _is_loading
    _is_loading = True
    ended, fault = judge(kind, directory, is_rewritten)
    _is_loading = False
    if _deeds:
        fault = f"{fault or ''} side effects: {_deeds}"
        _deeds.clear()
    return ended, fault
