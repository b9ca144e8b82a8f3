"""The installed command `llama-ray`. Subcommands import their modules when they run, so that `--help` is fast."""

import sys
from pathlib import Path
from typing import Annotated

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


def main() -> None:
    """Entry point of `llama-ray`."""
    app()
