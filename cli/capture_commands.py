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
            metavar="[REQUEST]", help="A file with the request's JSON body; - is stdin.", show_default=False
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    question: Annotated[
        str | None, typer.Option("-q", "--question", metavar="TEXT", help="A chat of one message.", show_default=False)
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="A completion.", show_default=False)] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A field of the body; VALUE is JSON or text.", show_default=False
        ),
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Such as /v1/messages; found from the body's fields if absent.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="capture-ID.json if absent.", show_default=False, dir_okay=False
        ),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Send a request, and store it with its seed, tokens, model digest, versions and settings.

    The server must allow it: start it with the argument capture_dir. The file has the prompt and the answer, and only this
    user can read it. Its name goes to stdout, the answer to stderr. The exit status is 1 if the request failed.

    Examples:

      llama-ray capture -q "Tell me a story." --set max_tokens=50 --set temperature=0.8

      llama-ray capture request.json -o bug.json --url http://10.0.0.5:8000
    """
    from cli.capture import run

    sys.exit(run(url, api_key, request, question, prompt, fields or (), route, output))


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A capture.", show_default=False)],
    url: Url = DEFAULT_URL,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Store the capture of the new answer.",
            show_default=False,
            dir_okay=False,
        ),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Send a captured request again with its seed, and compare the tokens.

    Prints the first token of each choice that differs, both texts, and what differs in model digest, versions, settings and
    CPU. The exit status is 0 for the same tokens, else 1. The server must allow captures: start it with capture_dir.

    Example: llama-ray replay bug.json --url http://127.0.0.1:8000
    """
    from cli.replay import run

    sys.exit(run(file, url, api_key, output))
