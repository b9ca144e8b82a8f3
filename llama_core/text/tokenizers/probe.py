"""Loads a tokenizer.json in a process of its own: on a damaged one, the library may hang, crash or take all memory.

The file brings its own regular expressions; the other kinds of tokenizers have fixed ones.
"""

import logging
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from llama_core.errors import TokenizerError

log = logging.getLogger(__name__)

_MAX_CPU_S: Final = 10  # a vocabulary of 128,000 tokens takes one second
_MAX_WALL_S: Final = 300  # a file that blocks takes no processor time
_MAX_BYTES: Final = 4 * 2**30  # without files that are mapped
_REFUSED: Final = 3  # exit status


def probe_tokenizer(path: Path, num_rows: int | None, max_cpu_s: int = _MAX_CPU_S) -> None:
    """Raises TokenizerError that names a file which is refused, crashes the library, or exceeds the limits."""
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
    try:
        done = subprocess.run(
            [*command, str(path), str(num_rows or ""), str(max_cpu_s)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_MAX_WALL_S,
        )
    except subprocess.TimeoutExpired:
        raise TokenizerError(f"{path}: does not load within {_MAX_WALL_S} s") from None
    except OSError as error:
        log.warning("%s: is loaded without a process of its own, which cannot be started (%s)", path, error)
        return
    if done.returncode == _REFUSED:
        raise TokenizerError(done.stdout.decode(errors="replace"))
    if done.returncode == -signal.SIGXCPU:
        raise TokenizerError(
            f"{path}: takes more than {max_cpu_s} s of processor time to load, or to encode a text of a single character: a "
            "pattern in it tries too many ways to match, or the file is damaged"
        )
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise TokenizerError(
            f"{path}: the library that reads it ends with {name}: damaged, or takes more than {_MAX_BYTES >> 30} GiB of memory"
        )


def main() -> None:
    """The process. Arguments: the file, the model's rows or "", the limit of processor time in seconds."""
    from llama_core.text.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer

    path, num_rows, max_cpu_s = sys.argv[1:]
    limits = ((resource.RLIMIT_CPU, int(max_cpu_s)), (resource.RLIMIT_DATA, _MAX_BYTES), (resource.RLIMIT_CORE, 0))
    for kind, most in limits:
        with suppress(OSError, ValueError):  # a lower hard limit
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    try:
        HuggingFaceTokenizer(path, int(num_rows) if num_rows else None).probe()
    except TokenizerError as error:
        sys.stdout.buffer.write(error.message.encode(errors="replace"))
        sys.stdout.flush()
        sys.exit(_REFUSED)
