"""Loads damaged files in a process of its own, because they may crash it. Started by `files.py`.

Each line in is JSON: `[kind, directory, whether the checksums still match the changed bytes]`. Each line out has the outcome,
and the finding if there is one.
"""

import hashlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from llama_core.checkpoint.loader import rank_weights
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import CheckpointError, ConfigError, LlamaError, TokenizerError
from llama_core.text.detokenizer import IncrementalDetokenizer
from llama_core.text.registry import load_tokenizer
from tests.support.programs import REPOSITORY

DEMO = REPOSITORY / "demo"
MOST_MEMORY_BYTES = 3 * 2**30  # beyond the memory that is mapped before the first file
# Python's audit events that no damaged file may cause.
_DEEDS = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.dlopen", "pty.", "webbrowser.", "urllib.", "smtplib.")
_HARMLESS = ("os.listdir", "os.scandir", "os.fwalk", "os.walk", "os.stat")
_TEXTS = ("Hello there, how are you?", "naïve 🦙 \u2581 x", "", " ", "a" * 300, "\n\t\x00", "日本語")

_deeds: list[str] = []
_is_loading = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _is_loading:
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
    digest = hashlib.sha256()
    for name, weight in rank_weights(reader, config, 0, 1, reader.dtype, torch.device("cpu")):
        digest.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def use_tokenizer(directory: Path) -> None:
    """Load a tokenizer, then encode and decode with it: a tokenizer that loads must also work."""
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    for text in _TEXTS:
        ids = tokenizer.encode(text, bos=True, eos=False)
        tokenizer.decode(ids)
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token in range(tokenizer.n_words):
        tokenizer.token_bytes(token)
        tokenizer.token_text(token)
        detokenizer.push([token])
    detokenizer.flush()


def judge(kind: str, directory: Path, is_rewritten: bool, vocab_size: int, undamaged: str) -> tuple[str, str | None]:
    """The outcome of loading, and the finding if there is one."""
    try:
        if kind == "tokenizer":
            use_tokenizer(directory)
        elif load_checkpoint(directory, vocab_size) != undamaged and kind == "checkpoint" and not is_rewritten:
            return "loaded", "damaged weights were loaded"
    except LlamaError as error:
        expected = (TokenizerError,) if kind == "tokenizer" else (CheckpointError, ConfigError)
        if not isinstance(error, expected):
            return type(error).__name__, f"{type(error).__name__} is no error about files: {error.message[:300]}"
        if len(error.message) > 2000:
            return type(error).__name__, f"a message of {len(error.message)} characters: {error.message[:300]}"
        if str(directory) not in error.message and error.param is None:
            return type(error).__name__, f"the file is not named: {error.message[:300]}"
        return type(error).__name__, None
    except BaseException as error:
        return "escaped", f"{type(error).__name__}: {str(error)[:300]}"
    return "loaded", None


def main() -> None:
    global _is_loading
    torch.set_num_threads(1)
    vocab_size = load_tokenizer(DEMO / "tokenizer.model").n_words
    undamaged = load_checkpoint(DEMO, vocab_size)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MEMORY_BYTES, resource.RLIM_INFINITY))
    sys.addaudithook(_audit)
    print(json.dumps(["ready", None]), flush=True)
    for line in sys.stdin:
        kind, directory, is_rewritten = json.loads(line)
        _is_loading = True
        ended, fault = judge(kind, Path(directory), is_rewritten, vocab_size, undamaged)
        _is_loading = False
        if _deeds:
            fault = f"{fault or ''} side effects: {_deeds}"
            _deeds.clear()
        print(json.dumps([ended, fault]), flush=True)


if __name__ == "__main__":
    main()
