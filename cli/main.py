"""The installed command `llama-ray`. Subcommands import their modules when they run, so that `--help` is fast."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    name="llama-ray",
    help="Serve Llama checkpoints on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Serve Llama checkpoints on Ray."""


@app.command()
def up(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="Serve's configuration file.", exists=True, dir_okay=False, show_default=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Arguments of the application, or http_options.port=N; each replaces the file's value.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show the lines of Ray, Serve and HAProxy on the terminal.")
    ] = False,
) -> None:
    """Start a server, print a banner when it is ready, and stop it on Ctrl-C."""
    from deployments.local.up import serve_file

    sys.exit(serve_file(config, overrides or (), verbose=verbose))


class ConvertFormat(StrEnum):
    """Formats that `convert` writes."""

    HF = "hf"
    META = "meta"


class ConvertDType(StrEnum):
    """Dtypes that `convert` writes."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class ConvertQuantize(StrEnum):
    """Formats of groups that `convert` writes."""

    INT4 = "int4"
    INT8 = "int8"


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A folder of Hugging Face's or Meta's, or a GGUF file.", exists=True)],
    target: Annotated[Path, typer.Argument(help="The folder to write, which must not exist.")],
    target_format: Annotated[ConvertFormat, typer.Option("--format", help="The format to write.")],
    shards: Annotated[int, typer.Option(min=1, help="Files of weights.")] = 1,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer; if absent, what lies at SOURCE.", exists=True)
    ] = None,
    dtype: Annotated[
        ConvertDType, typer.Option(help="Of the weights; auto is SOURCE's own. Quantized weights are expanded.")
    ] = ConvertDType.AUTO,
    quantize: Annotated[
        ConvertQuantize | None,
        typer.Option(
            help="Pack linear layers but the output layer as compressed-tensors, in groups of 32; --format hf only."
        ),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Load both checkpoints and compare their logits.")] = True,
) -> None:
    """Write a checkpoint in another format, with SHA256SUMS, and compare the logits of both."""
    from cli.convert import run

    quantized: Literal["int4", "int8"] | None = quantize.value if quantize is not None else None
    sys.exit(run(source, target, target_format.value, shards, tokenizer, dtype.value, quantized, verify=verify))


def main() -> None:
    """Entry point of `llama-ray`."""
    app()
