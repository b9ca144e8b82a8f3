"""What the options of all commands have in common: names of environment variables, units of numbers, shared types."""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from llama_core.sizes import EXAMPLES, parse_size

PREFIX: Final = "LLAMA_RAY"
DEFAULT_URL: Final = "http://127.0.0.1:8000"


def variable_of(command: str, parameter: TyperOption | TyperArgument) -> str:
    """LLAMA_RAY_<COMMAND>_<OPTION>, by the first long name of an option: LLAMA_RAY_BENCH_MAX_TOKENS."""
    long = next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])
    return "_".join((PREFIX, command, *long.lstrip("-").split("-"))).upper()


def variables_of(parameter: TyperOption | TyperArgument) -> list[str]:
    """The variables that a parameter reads. The first one that is set and not empty counts."""
    names = parameter.envvar
    return [names] if isinstance(names, str) else list(names or ())


class _Names(list[str]):
    """Names that an error message shows side by side."""

    def __str__(self) -> str:
        return ", ".join(self)


class Command(TyperCommand):
    """A command whose options and arguments read the variable of `variable_of` before those that they name themselves.

    The list of KEY=VALUE arguments reads none: each key has the server's own variable.
    """

    def __init__(self, name: str | None, *, params: Sequence[Any] | None = None, **rest: Any) -> None:
        for parameter in params or ():
            if parameter.nargs == 1:
                parameter.envvar = _Names([variable_of(name or "", parameter), *variables_of(parameter)])
                parameter.show_envvar = True
        super().__init__(name, params=list(params or ()), **rest)


def size_option(*names: str, help: str, metavar: str = "SIZE", least: int = 1, **more: Any) -> Any:
    """An option that takes a whole number of at least `least` with a unit, such as 8k or 4GiB."""

    def size(value: str | int) -> int:
        """Raises BadParameter, which is shown with the option's name."""
        try:
            number = value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if number < least:
            raise typer.BadParameter(f"must be at least {least}, {EXAMPLES}")
        return number

    return typer.Option(*names, parser=size, metavar=metavar, help=help, **more)


Url = Annotated[
    str,
    typer.Option(metavar="URL", help="The server, with or without /v1 at the end.", envvar="LLAMA_RAY_URL"),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Sent as a bearer token; servers without keys need none.",
        envvar=["LLAMA_RAY_API_KEY", "OPENAI_API_KEY"],
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The model; the first that the server lists if absent.", envvar="LLAMA_RAY_MODEL"
    ),
]
