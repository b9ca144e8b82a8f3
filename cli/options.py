"""Types of options that several commands share."""

from typing import Annotated, Any

import typer

from llama_core.sizes import EXAMPLES, parse_size

URL_VARIABLES = ["LLAMA_RAY_URL"]
KEY_VARIABLES = ["LLAMA_RAY_API_KEY", "OPENAI_API_KEY"]
DEFAULT_URL = "http://127.0.0.1:8000"


def size(value: str | int) -> int:
    """A positive whole number with a unit, such as 8k or 4GiB. Raises BadParameter, shown with the option's name."""
    try:
        number = value if isinstance(value, int) else parse_size(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if number < 1:
        raise typer.BadParameter(f"must be at least 1, {EXAMPLES}")
    return number


def size_option(*names: str, help: str, envvar: str | None, metavar: str = "SIZE", **more: Any) -> Any:
    """An option that `size` reads."""
    return typer.Option(*names, parser=size, metavar=metavar, help=help, envvar=envvar, **more)


Url = Annotated[
    str,
    typer.Option(
        help="Base URL of the server, with or without /v1 at the end.", envvar=URL_VARIABLES, show_envvar=True
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", help="Sent as a bearer token.", envvar=KEY_VARIABLES, show_envvar=True, show_default=False
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="Name of the model; the first that the server lists if absent.", envvar="LLAMA_RAY_MODEL"),
]
