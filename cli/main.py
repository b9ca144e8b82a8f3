"""The installed command `llama-ray`. Subcommands import their modules when they run, so that `--help` is fast."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from cli.commands import batch, chat, estimate, up
from cli.options import Command

app = typer.Typer(
    name="llama-ray",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes cut the names of variables off on a terminal of 80 columns
)


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(version("llama-on-ray"))
    except PackageNotFoundError:  # `python -m cli` without an installation
        typer.echo("unknown: the package is not installed")
    raise typer.Exit


@app.callback()
def _commands(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve Llama checkpoints on Ray.

    Each option and argument of a command is an environment variable too, LLAMA_RAY_<COMMAND>_<OPTION>, such as
    LLAMA_RAY_CHAT_MAX_TOKENS for --max-tokens of chat. What stands on the command line wins.

    Counts, lengths and sizes may have units: 8k is 8,000, 8Ki is 8,192, 512MB is 512,000,000, 4GiB is 4 x 2^30.

    \b
    Examples:
      llama-ray up serve_config.yaml --check
      llama-ray up serve_config.yaml max_seq_len=8Ki
      llama-ray chat -q "How many days are in a week?"
    """


for command in (up, estimate, chat, batch):
    app.command(cls=Command)(command)


def main() -> None:
    """Entry point of `llama-ray`."""
    _complete_environment()
    app(prog_name="llama-ray")


def _complete_environment() -> None:
    """Give this process what every library expects: standard streams, a home directory and a working directory."""
    for number, stream in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, stream) is None:  # the caller has closed it: another file would take its number
            os.dup2(nowhere := os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, stream, os.fdopen(nowhere, "w" if number else "r"))
    if not os.environ.get("HOME"):
        os.environ.pop("HOME", None)
        home = os.path.expanduser("~")  # of /etc/passwd
        os.environ["HOME"] = home if home != "~" else "/nonexistent"
    try:
        os.getcwd()
    except OSError as error:
        sys.exit(f"llama-ray: the working directory cannot be used: {error.strerror}; change to another one")
