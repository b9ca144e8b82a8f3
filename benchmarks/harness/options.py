"""The options that commands share, so that an option has one meaning. Standard library only."""

import argparse
import os
from pathlib import Path

from benchmarks.harness.common import REPOSITORY


def command_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks NAME`, described by the first line of the module's docstring."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=(doc or "").partition("\n")[0])


def question_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of a command that measures: its result goes to --json too."""
    parser = command_parser(name, doc)
    add_output_option(parser)
    return parser


def add_output_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the result to this file, as indented JSON"
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The model to measure, as benchmarks.harness.in_process and serve_ours read it."""
    group = parser.add_argument_group("model")
    group.add_argument("--ckpt", type=Path, default=REPOSITORY / "demo", help="directory in Meta's format")
    group.add_argument("--tokenizer", type=Path, help="tokenizer.model in the checkpoint's directory if absent")
    group.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"))
    group.add_argument("--threads", type=int, help="threads of torch; torch's own default if absent")
    group.add_argument("--quantization", default="auto", help="auto, none, int8, int8_groups, int4, int4_min or fp8")
    group.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="further engine settings, such as backend=torch; speculation and prefix_caching are off by default",
    )


def add_load_options(parser: argparse.ArgumentParser, *, prompt: int, output: int, vocab_size: int = 32000) -> None:
    """Requests over HTTP: the model's name, their lengths in tokens, and the ids that prompts are made of."""
    parser.add_argument("--model", default="llama", help="the model's name over HTTP")
    parser.add_argument("--prompt", type=int, default=prompt, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=output, help="tokens of each answer")
    parser.add_argument("--vocab-size", type=int, default=vocab_size, help="prompts have random ids below this one")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Our server, where the command starts it."""
    parser.add_argument("--server", nargs="*", default=[], metavar="NAME=VALUE", help="further arguments of our server")
    parser.add_argument("--dtype", default="auto")


def model_name(options: argparse.Namespace) -> str:
    """The model's name in tables: its directory's, or the parent's of a directory called meta or hf."""
    path: Path = Path(os.path.abspath(options.ckpt))
    return path.parent.name if path.name in ("meta", "hf") else path.name
