"""The subcommands `up` and `chat`: their options and help."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.options import DEFAULT_URL, ApiKey, Model, Server, Url, is_setting, size_option


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


def _config_and_settings(first: str, others: list[str]) -> tuple[Path, list[str]]:
    """The first argument is CONFIG, or a setting where a variable has CONFIG."""
    if not is_setting(first):
        return Path(first), others
    config = os.environ.get("LLAMA_RAY_UP_CONFIG") or os.environ.get("LLAMA_RAY_CONFIG")
    if not config:
        raise typer.BadParameter(
            f"{first!r} is a setting: the configuration file comes before it, such as serve_config.yaml",
            param_hint="CONFIG",
        )
    if not os.path.isfile(config):
        problem = "is a directory" if os.path.isdir(config) else "does not exist"
        raise typer.BadParameter(f"file {config!r} {problem}", param_hint="CONFIG")
    return Path(config), [first, *others]


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
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Arguments of the application, or http_options.NAME, in place of the file's. They follow CONFIG.",
            show_default=False,
            callback=_checked_settings,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only make the checks, all of them, and name the remedy of each failure."),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("-v", "--verbose", help="Show the lines of Ray, Serve and HAProxy here instead of in a log file."),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="End the applications that run on the cluster which RAY_ADDRESS names."),
    ] = False,
) -> None:
    """Start a server; Ctrl-C stops it.

    Checks arguments, port, placement and files, starts a Ray cluster on this machine, or joins the one that RAY_ADDRESS names,
    loads the model, and prints the URL when the server is ready. The exit status is 0 after Ctrl-C, 1 if the server cannot
    start, 2 for wrong settings.

    With --check nothing starts. The checks then also read the checkpoint and the tokenizer, compute the digests of all files
    and estimate the memory. The exit status is 0 if no check failed, warnings included, 1 if one failed, 2 for wrong settings.

    Each argument of the application is a variable too, LLAMA_<ARGUMENT>, where neither the file nor KEY=VALUE sets it.

    \b
    Examples:
      llama-ray up serve_config.yaml
      llama-ray up serve_config.yaml --check
      llama-ray up serve_config.yaml ckpt_dir=/models/Llama-3.1-8B max_seq_len=8Ki
      llama-ray up serve_config.yaml kv_cache_bytes=4GiB http_options.port=8080
    """
    from deployments.local.up import check_file, serve_file

    path, settings = _config_and_settings(config, overrides or [])
    if check:
        sys.exit(check_file(path, settings, replaces=replace))
    sys.exit(serve_file(path, settings, verbose=verbose, replaces=replace))


def chat(
    server: Server = None,
    url: Url = DEFAULT_URL,
    question: Annotated[
        str | None,
        typer.Option(
            "-q",
            "--question",
            metavar="TEXT",
            help="Ask once, print the answer and end; - reads the question from stdin.",
        ),
    ] = None,
    model: Model = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System message; none if absent.", envvar="LLAMA_RAY_SYSTEM"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=2,
            metavar="NUMBER",
            help="0 takes the most likely token, higher is more random; the server's default if absent.",
            envvar="LLAMA_RAY_TEMPERATURE",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="NUMBER",
            help="Sample from the likeliest tokens of this total probability; the server's default if absent.",
            envvar="LLAMA_RAY_TOP_P",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        size_option(
            "--max-tokens",
            help="Tokens of one answer at most; the server's default if absent.",
            envvar="LLAMA_RAY_MAX_TOKENS",
            metavar="TOKENS",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            help="The same seed gives the same answer; the server picks one if absent.",
            envvar="LLAMA_RAY_SEED",
        ),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to a model in the terminal.

    Answers stream. At the prompt: /reset, /system TEXT, /exit, /help; three quotes begin and end a message of several lines.
    Ctrl-C stops an answer, not the program. Lines are kept in ~/.local/state/llama-ray/chat_history; LLAMA_RAY_HISTORY names
    another file, empty for none. NO_COLOR=1 leaves colours out.

    With -q the answer alone goes to stdout, reasoning to stderr, and each tool call is a line of JSON. The exit status is 1 if
    a request failed.

    \b
    Examples:
      llama-ray chat http://10.0.0.5:8000 --system "Answer in one sentence."
      llama-ray chat -q "How many days are in a week?" --temperature 0
      cat letter.txt | llama-ray chat -q -
    """
    from cli.chat import run

    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    sys.exit(run(server or url, api_key, model, question, system, **sampling))
