"""What the options of all commands have in common: names of environment variables, units of numbers, shared types."""

import os
from collections.abc import Sequence
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from llama_core.sizes import EXAMPLES, parse_size

PREFIX: Final = "LLAMA_RAY"
DEFAULT_URL: Final = "http://127.0.0.1:8000"
# The base of typer's errors of wrong arguments, for which typer has no public name. They exit with status 2.
_UsageError: Final = cast(type[typer.BadParameter], typer.BadParameter.__base__)


def variable_of(command: str, parameter: TyperOption | TyperArgument) -> str:
    """LLAMA_RAY_<COMMAND>_<OPTION>, by the first long name of an option: LLAMA_RAY_CHAT_MAX_TOKENS."""
    long = next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])
    return "_".join((PREFIX, command, *long.lstrip("-").split("-"))).upper()


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
                own = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or ()
                parameter.envvar = _Names([variable_of(name or "", parameter), *own])  # the first that is set counts
                parameter.show_envvar = True
        super().__init__(name, params=list(params or ()), **rest)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts refusals of typer's own in the words of the server's, and names the option that a KEY=VALUE stands for."""
        given = list(args)  # the parser consumes `args`
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if (reason := _own_words(error.__cause__)) is not None:
                error.message = reason
            setting = next((arg for arg in given if arg in error.message and is_setting(arg)), None)
            if setting is not None and not any(parameter.nargs == -1 for parameter in self.params):
                error.message = f"{error.message.rstrip('.')}. {self._as_option(setting)}"
            raise

    def _as_option(self, setting: str) -> str:
        """What to write in place of KEY=VALUE in a command that takes none."""
        key, _, value = setting.partition("=")
        option = "--" + key.replace("_", "-")
        if any(option in parameter.opts for parameter in self.params):
            return f"Write it as an option: {option} {value}"
        return f"KEY=VALUE is for up; llama-ray {self.name} --help lists the options."


def is_setting(argument: str) -> bool:
    """Whether an argument has the form KEY=VALUE, and is no file with such a name."""
    key, equals, _ = argument.partition("=")
    # Unlike Path.exists, os.path.exists raises nothing for a name that is too long.
    return bool(equals) and key.replace(".", "_").isidentifier() and not os.path.exists(argument)


def _own_words(cause: BaseException | None) -> str | None:
    """Of a value that typer's validation by pydantic has refused."""
    from pydantic import ValidationError

    from deployments.local.config_file import argument_error

    return argument_error(cause.errors()[0])[1] if isinstance(cause, ValidationError) else None


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


def checked_url(url: str | None) -> str | None:
    from cli.openai_http import ApiError, api_base

    try:
        if url is not None:
            api_base(url)
    except ApiError as error:
        raise typer.BadParameter(str(error)) from None
    return url


Url = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="The server, with or without /v1 at the end.",
        envvar="LLAMA_RAY_URL",
        callback=checked_url,
    ),
]
Server = Annotated[
    str | None, typer.Argument(metavar="URL", help="As --url.", show_default=False, callback=checked_url)
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
