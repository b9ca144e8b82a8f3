"""Starts our server on a given port, for the paired runner: serve_config.yaml with other arguments.

    python -m benchmarks serve_ours --config /tmp/serve_config.yaml --port 8090 ckpt_dir=demo max_batch_size=32

Speculation and prefix caching are off unless the arguments name them, because they change how much is computed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.common import REPOSITORY
from benchmarks.harness.options import command_parser
from benchmarks.harness.programs import write_config

OFF = {"speculation": False, "prefix_caching": False}


def server_args(options: argparse.Namespace, **limits: int) -> dict[str, Any]:
    """For a command's server: the model of its `options` on one rank, with `limits`, and what its --server names."""
    args = {
        "model_id": options.model,
        "ckpt_dir": str(options.ckpt.resolve()),
        "tokenizer_path": str((options.tokenizer or options.ckpt / "tokenizer.model").resolve()),
        "model_parallel_size": 1,
        "cpus_per_rank": os.cpu_count() or 1,
        "dtype": options.dtype,
        "device": options.device,
        "quantization": options.quantization,
    }
    return args | limits | OFF | dict(pair.split("=", 1) for pair in options.server)


def main(argv: Sequence[str]) -> None:
    parser = command_parser("serve_ours", __doc__)
    parser.add_argument("--config", type=Path, required=True, help="the file to write")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--defaults", action="store_true", help="keep the defaults of speculation and prefix caching")
    parser.add_argument("--serve-run", action="store_true", help="by plain `serve run CONFIG`")
    parser.add_argument("--engines", type=int, default=0, help="so many behind a front; 0: one process for both")
    parser.add_argument("args", nargs="*", metavar="NAME=VALUE")
    options = parser.parse_args(argv)
    # Values stay text; the server parses them like arguments of a command line.
    given = dict(pair.split("=", 1) for pair in options.args)
    path = write_config(options.config, options.port, given if options.defaults else OFF | given, options.engines)
    os.environ["RAY_ADDRESS"] = "local"
    if options.serve_run:
        os.chdir(REPOSITORY)  # where `serve run` finds the application
        serve = str(Path(sys.executable).parent / "serve")
        os.execv(serve, [serve, "run", str(path)])
    os.execv(sys.executable, [sys.executable, "-m", "cli", "up", "-v", str(path)])
