"""The configuration file that `llama-ray up` serves, with the command line's key=value arguments applied."""

import contextlib
import difflib
import re
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from deployments.args import ServerArgs
from llama_core.errors import ConfigError

IMPORT_PATH: Final = "deployments.app:build_app"  # of this server's application
_REASONS: Final = {  # by pydantic's error types, in the words of the other errors
    "extra_forbidden": "no such argument",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "must be one of {expected}",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
}

_NULLS: Final = ("null", "Null", "NULL", "~")  # YAML's


def _port(value: object) -> object:
    number = int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,5}", value) else value
    if type(number) is not int or not 1 <= number <= 65535:
        raise ValueError("must be a whole number from 1 to 65535")
    return number


class HttpOptions(BaseModel):
    """Serve's options of the HTTP proxy, of which Serve itself ignores unknown ones. Ray is not imported for them."""

    model_config = ConfigDict(extra="forbid")

    host: str = Field("0.0.0.0", min_length=1)
    port: Annotated[int, BeforeValidator(_port)] = 8000
    root_path: str = ""
    request_timeout_s: float | None = None
    keep_alive_timeout_s: int = 90
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """`content` is Serve's schema, with the overrides; `path` is the file that it was read from. is_made: there is no file, the
    content was made for a model."""

    path: Path
    content: dict[str, Any]
    is_made: bool = False

    def copied_to(self, directory: Path) -> "ConfigFile":
        """With the overrides in the file. The copy is ASCII: Serve reads a file in the encoding of the locale."""
        copy = directory / self.path.name
        copy.write_text(yaml.safe_dump(self.content, sort_keys=False))
        return replace(self, path=copy)

    def with_args(self, changes: Mapping[str, Any]) -> "ConfigFile":
        """With other arguments of the first application."""
        first, *others = self.content["applications"]
        changed = first | {"args": (first.get("args") or {}) | dict(changes)}
        return replace(self, content=self.content | {"applications": [changed, *others]})

    @property
    def host(self) -> str:
        return self.http_options.host

    @property
    def port(self) -> int:
        return self.http_options.port

    @property
    def http_options(self) -> HttpOptions:
        return HttpOptions.model_validate(self.content.get("http_options") or {})

    @property
    def application(self) -> dict[str, Any]:
        """The first application, which `llama-ray up` follows."""
        application: dict[str, Any] = self.content["applications"][0]
        return application

    @property
    def server_args(self) -> ServerArgs | None:
        """Of this server's application; None for another application. Raises ConfigError that names each wrong argument."""
        if self.application.get("import_path") != IMPORT_PATH:
            return None
        try:
            return ServerArgs.model_validate(self.application.get("args") or {})
        except ValidationError as error:
            raise _refusal(error, ServerArgs.model_fields) from error

    @property
    def app_name(self) -> str:
        return str(self.application.get("name", "default"))

    @property
    def route_prefix(self) -> str:
        """Where the application's routes start, without a slash at the end; empty for "/"."""
        return str(self.application.get("route_prefix") or "/").rstrip("/")

    @property
    def model(self) -> str:
        return str((self.application.get("args") or {}).get("model_id", self.app_name))


def read_config(path: Path, overrides: Sequence[str]) -> ConfigFile:
    """Read the file and apply the overrides.

    Raises ConfigError for a file without applications, and as `with_overrides`.
    """
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error.reason} at byte {error.position}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # YAML's numbers and dates raise ValueError
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("applications"), list)
        or not content["applications"]
        or not isinstance(content["applications"][0], dict)
    ):
        raise ConfigError(f"{path} has no list of applications")
    for section, key in ((content, "http_options"), (content["applications"][0], "args")):
        if not isinstance(section.get(key) or {}, dict):
            raise ConfigError(f"{path}: {key} must be a mapping of names to values")
    return with_overrides(ConfigFile(path, content), overrides)


def with_overrides(config: ConfigFile, overrides: Sequence[str]) -> ConfigFile:
    """Raises ConfigError for an override without a value, and for wrong `http_options`."""
    for override in overrides:
        _apply(override, config.content)
    try:
        config.http_options  # noqa: B018  raises ValidationError
    except ValidationError as error:
        raise _refusal(error, HttpOptions.model_fields, "http_options.") from error
    if config.host == "::":  # Serve has HAProxy listen on IPv4 alone for this spelling
        config.content["http_options"]["host"] = "::0"
    return config


def _apply(override: str, content: dict[str, Any]) -> None:
    """Put the override's value into the content of the file. The command has refused what is not key=value."""
    key, _, value = override.partition("=")
    section, _, option = key.rpartition(".")
    if section not in ("", "http_options"):
        raise ConfigError(f"{key!r}: only http_options.NAME has a dot; an argument is its plain name")
    try:
        read = yaml.safe_load(value)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{key}: the value is not valid YAML") from error
    if read is None and value.strip() not in _NULLS:
        raise ConfigError(f"{key}: has no value; {key}=null is null, for what is optional")
    holder, name = (content, "http_options") if section else (content["applications"][0], "args")
    holder[name] = (holder.get(name) or {}) | {option: read}


def _refusal(error: ValidationError, known: Iterable[str], section: str = "") -> ConfigError:
    """Which arguments pydantic refuses, why, and the names that were probably meant."""
    return ConfigError("; ".join(_described(each, known, section) for each in error.errors()))


def _described(error: ErrorDetails, known: Iterable[str], section: str) -> str:
    name, why = argument_error(error)
    if error["type"] == "extra_forbidden":
        why = f"{why}; {similar_argument(name, known)}"
    return f"{section}{name}: {why}" if name else why


def argument_error(error: ErrorDetails) -> tuple[str, str]:
    """The argument that pydantic refuses ("" for all together), and why."""
    name = ".".join(map(str, error["loc"]))
    why = _REASONS.get(error["type"], "")
    return name, why.format(**error.get("ctx", {})) if why else error["msg"].removeprefix("Value error, ")


def similar_argument(name: str, known: Iterable[str] = ServerArgs.model_fields) -> str:
    """The argument that an unknown `name` probably means, or where all of them are listed."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "docs/configuration.md lists every argument"


def claim_port(host: str, port: int) -> socket.socket:
    """Hold the port against other commands `llama-ray up` as long as the returned socket is open, from before HAProxy listens.

    HAProxy and Serve's proxy would share a port with another server's. Raises ConfigError with the process that holds it.
    """
    claim = socket.socket(socket.AF_UNIX)
    name = f"\0llama-ray {port}"  # in no file system: the kernel frees it when its process ends
    try:
        claim.bind(name)
        claim.listen()
    except OSError as error:
        pid = 0
        with claim, contextlib.suppress(OSError):
            claim.settimeout(1)
            claim.connect(name)
            pid = struct.unpack("3i", claim.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
        raise ConfigError(
            f"{host}:{port} is the port of another `llama-ray up`"
            f"{f', process {pid}' if pid else ''}. End that one, or set http_options.port.",
            param="port",
        ) from error
    return claim


def check_port_is_free(host: str, port: int) -> None:
    """Raises ConfigError. HAProxy and Serve's proxy would share a port with another server: each would get some requests."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
        try:
            listener.bind((host, port))
        except (TypeError, UnicodeError) as error:  # a name that IDNA cannot encode
            raise ConfigError("http_options.host: is not a host's name or address") from error
        except OSError as error:
            raise ConfigError(
                f"{host}:{port} cannot be used: {error.strerror}. Is another server running? Set http_options.port."
            ) from error
