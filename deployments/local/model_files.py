"""Finds missing and unreadable files of the model before `llama-ray up` starts Ray, which would take 20 s to find them.

The check is of this machine's files, so it is for a cluster without other nodes. The contents are left to the replica and the
ranks.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from deployments.args import ServerArgs
from deployments.local.config_file import ConfigFile
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import ConfigError, LlamaError
from llama_core.text.registry import tokenizer_files

_CHECKPOINT_REMEDY: Final = (
    "set ckpt_dir to a folder or .gguf file with the whole model, which `hf download ORG/NAME --local-dir models/NAME` fetches "
    "from Hugging Face"
)
_TOKENIZER_REMEDY: Final = "put the model's tokenizer beside its weights, or set tokenizer_path to it"


def check_model_files(config: ConfigFile) -> None:
    """Raises ConfigError that names each wrong argument, or a missing or unreadable file of the checkpoint or tokenizer with
    the remedy.

    An application of other code is not checked, nor are the files of one with a `runtime_env`, which may bring its own.
    """
    args = config.server_args
    if args is None or any(_runtime_envs(config.application)):
        return
    _check("ckpt_dir", _CHECKPOINT_REMEDY, lambda: _read_checkpoint(args))
    _check("tokenizer_path", _TOKENIZER_REMEDY, lambda: _read_first_bytes(tokenizer_files(args.tokenizer)))


def _runtime_envs(application: Mapping[str, Any]) -> Iterator[object]:
    """That of the application and those of its deployments' replicas."""
    yield application.get("runtime_env")
    for deployment in application.get("deployments") or ():
        yield (deployment.get("ray_actor_options") or {}).get("runtime_env")


def _check(argument: str, remedy: str, read: Callable[[], None]) -> None:
    try:
        read()
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; {remedy}", param=argument) from error
    except LlamaError as error:
        has_remedy = argument in error.message  # as for a folder with several GGUF models, which it lists
        raise ConfigError(error.message if has_remedy else f"{error.message}; {remedy}", param=argument) from error


def _read_checkpoint(args: ServerArgs) -> None:
    """Reads names and headers. Raises OSError or LlamaError."""
    path = args.checkpoint
    if path.is_dir():
        os.listdir(path)  # a folder without permission looks empty to `glob`
    else:
        path.stat()
    source = open_checkpoint(path)
    source.num_shards()
    _read_first_bytes(source.files)


def _read_first_bytes(files: Sequence[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            opened.read(1)
