"""The subcommands that store requests and send them again: their options and help."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.options import DEFAULT_URL, ApiKey, Url


def capture(
    request: Annotated[
        Path | None,
        typer.Argument(
            metavar="REQUEST",
            help="A file with the request's JSON body; - is stdin. Without it, give -q or --prompt.",
            show_default=False,
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    question: Annotated[
        str | None, typer.Option("-q", "--question", metavar="TEXT", help="Send a chat of this one message.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Send a completion of this prompt.")] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set a field of the body, such as max_tokens=1k; VALUE is JSON, else text. May be repeated; in the "
            "variable, fields are separated by spaces.",
        ),
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Route of the request, such as /v1/messages; told by the body's fields if absent."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="File to write; capture-ID.json if absent.", dir_okay=False
        ),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Send a request and keep it with its seed, tokens and versions.

    The server must allow it: start it with the argument capture_dir. The file has the prompt, the answer, the digest of the
    model's files, versions and settings, and only this user can read it. Its name goes to stdout, the answer to stderr. The
    exit status is 1 if the request failed.

    \b
    Examples:
      llama-ray capture -q "Tell me a story." --set max_tokens=50
      llama-ray capture --prompt "Once" --set temperature=0.8 -o story.json
      llama-ray capture request.json --url http://10.0.0.5:8000
    """
    from cli.capture import run

    sys.exit(run(url, api_key, request, question, prompt, fields or (), route, output))


def replay(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A file that `llama-ray capture` wrote, or one of capture_dir."),
    ],
    url: Url = DEFAULT_URL,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Keep the capture of the new answer in this file; not kept if absent.",
            dir_okay=False,
        ),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Send a captured request again and compare the tokens.

    The request has the seed that was used. Prints the first token of each choice that differs, both texts there, and what
    differs in the digest of the model, versions, settings and CPU. The exit status is 0 for the same tokens, else 1. The server
    must allow captures: start it with the argument capture_dir.

    \b
    Examples:
      llama-ray replay story.json
      llama-ray replay story.json --url http://10.0.0.5:8000 -o again.json
    """
    from cli.replay import run

    sys.exit(run(file, url, api_key, output))
