"""The subcommands around a server on this machine or cluster: their options and help."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cli.options import PREFIX, is_setting


def _config_or_setting(argument: str) -> str:
    """Refuses what is neither a file nor KEY=VALUE."""
    if os.path.isdir(argument):
        raise typer.BadParameter(f"file {argument!r} is a directory")
    if not os.path.exists(argument) and not is_setting(argument):
        raise typer.BadParameter(f"file {argument!r} does not exist")
    return argument


def _checked_settings(settings: list[str] | None) -> list[str]:
    for setting in settings or ():
        key, equals, _ = setting.partition("=")
        if not (key and equals):
            raise typer.BadParameter(f"{setting!r} is not of the form KEY=VALUE")
    return settings or []


def _config_and_settings(command: str, first: str | None, others: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The first argument is CONFIG, or a setting where a variable has CONFIG, or where the server's defaults do."""
    if first is None or not is_setting(first):
        return None if first is None else Path(first), list(others)
    config = next(
        (path for name in (f"{PREFIX}_{command}_CONFIG", f"{PREFIX}_CONFIG") if (path := os.environ.get(name))), None
    )
    if config is not None and not os.path.isfile(config):
        problem = "is a directory" if os.path.isdir(config) else "does not exist"
        raise typer.BadParameter(f"file {config!r} {problem}", param_hint="CONFIG")
    return None if config is None else Path(config), [first, *others]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Arguments of the application, or http_options.NAME, in place of the file's. They follow CONFIG.",
        show_default=False,
        callback=_checked_settings,
    ),
]


def up(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="Serve's configuration file.",
            parser=_config_or_setting,
            show_default=False,
            envvar="LLAMA_RAY_CONFIG",
        ),
    ],
    overrides: Overrides = None,
    verbose: Annotated[
        bool,
        typer.Option("-v", "--verbose", help="Show the lines of Ray, Serve and HAProxy here instead of in a log file."),
    ] = False,
) -> None:
    """Start a server; Ctrl-C stops it.

    Starts a Ray cluster on this machine, or joins the one that RAY_ADDRESS names, loads the model, and prints the URL when the
    server is ready. The exit status is 0 after Ctrl-C, 1 if the server cannot start, 2 for wrong settings.

    Each argument of the application is a variable too, LLAMA_<ARGUMENT>, where neither the file nor KEY=VALUE sets it.

    \b
    Examples:
      llama-ray up serve_config.yaml
      llama-ray up serve_config.yaml ckpt_dir=/models/Llama-3.1-8B max_seq_len=8Ki
      llama-ray up serve_config.yaml kv_cache_bytes=4GiB http_options.port=8080
    """
    from deployments.local.up import serve_file

    path, settings = _config_and_settings("UP", config, overrides or ())
    if path is None:
        raise typer.BadParameter(
            f"{config!r} is a setting: the configuration file comes before it, such as serve_config.yaml",
            param_hint="CONFIG",
        )
    sys.exit(serve_file(path, settings, verbose=verbose))


def doctor(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            help="Serve's configuration file; the server's defaults if absent.",
            parser=_config_or_setting,
            show_default=False,
            envvar="LLAMA_RAY_CONFIG",
        ),
    ] = None,
    overrides: Overrides = None,
    digests: Annotated[
        bool,
        typer.Option(
            help="Read all files of the checkpoint and compare their SHA-256 digests.", envvar="LLAMA_RAY_DIGESTS"
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")] = False,
) -> None:
    """Check what a server needs, and name the remedy of each failure.

    Checks Python, Ray, HAProxy, open files, /dev/shm, the port, arguments, the C++ compiler, GPUs, placement (on the cluster
    that RAY_ADDRESS names, else on this machine), checkpoint, tokenizer, digests and memory. Starts no server. The exit status
    is 1 if a check fails, 0 with warnings alone.

    \b
    Examples:
      llama-ray doctor serve_config.yaml
      llama-ray doctor serve_config.yaml max_seq_len=8Ki http_options.port=8080
      llama-ray doctor ckpt_dir=/models/Llama-3.1-8B
      llama-ray doctor serve_config.yaml --no-digests --json
    """
    from cli.doctor.command import run

    path, settings = _config_and_settings("DOCTOR", config, overrides or ())
    sys.exit(run(path, settings, reads_files=digests, as_json=as_json))


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of text.")] = False,
) -> None:
    """Show versions, CPU, backend and settings for a bug report.

    Values of variables that may hold a secret or a prompt are masked. Compiles the C++ library if there is none yet, which
    takes up to a minute.

    \b
    Examples:
      llama-ray env
      llama-ray env --json > env.json
    """
    from cli.env import run

    sys.exit(run(as_json=as_json))
