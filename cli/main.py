"""The installed command `llama-ray`. Subcommands import their modules when they run, so that `--help` is fast."""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from cli.checkpoint_commands import estimate
from cli.commands import chat, up
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


for command in (up, estimate, chat):
    app.command(cls=Command)(command)


def main() -> None:
    """Entry point of `llama-ray`."""
    app(prog_name="llama-ray")
