"""The contenders of a paired run, read from TOML files: ours from ours.toml, peers from the user's file.

A contender is a command that prints its figures as a line of JSON, or a server that gets the same load as the others.
Placeholders between braces in a command are replaced: see peers.example.toml.
"""

import contextlib
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from benchmarks.harness.common import REPOSITORY, last_json
from benchmarks.harness.programs import Program, free_port
from llama_core.execution.weight_formats.registry import QUANTIZED


class BadFile(Exception):
    """A contender's file is invalid; the message names the place."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question to contenders. figures: names of figures in a result; lower_is_better: those of which less is better.

    load: options of `online` for a server; None if only a command can answer.
    """

    name: str
    figures: tuple[str, ...]
    lower_is_better: frozenset[str]
    load: tuple[str, ...] | None


_TIMES = ("ttft_p50_ms", "ttft_p99_ms", "between_p50_ms", "between_p99_ms")
QUESTIONS = {
    question.name: question
    for question in (
        Question(
            "decode",
            ("decode_tok_s",),
            frozenset(),
            ("--concurrency", "1", "--requests", "{repeats}", "--prompt", "{prompt}", "--output", "{output}"),
        ),
        Question("prefill", ("prefill_tok_s",), frozenset(), None),
        Question(
            "offline",
            ("output_tok_s",),
            frozenset(),
            ("--mixed", "--concurrency", "{requests}", "--requests", "{requests}"),
        ),
        Question(
            "online",
            ("output_tok_s", *_TIMES),
            frozenset(_TIMES),
            (
                *("--concurrency", "{concurrency}", "--requests", "{requests}"),
                *("--prompt", "{prompt}", "--output", "{output}"),
            ),
        ),
    )
}
# Default values of the placeholders of each question.
DEFAULTS: dict[str, dict[str, str]] = {
    "decode": {"prompt": "128", "output": "128", "requests": "5", "concurrency": "1"},
    "prefill": {"prompt": "512", "output": "1", "requests": "5", "concurrency": "1"},
    "offline": {"prompt": "128", "output": "64", "requests": "32", "concurrency": "32"},
    "online": {"prompt": "128", "output": "64", "requests": "64", "concurrency": "8"},
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One contender's entry in a file. commands: by question. server: for the questions without a command."""

    name: str
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    server: tuple[str, ...] | None = None
    ready: str = "/health"
    served_model: str = "{model}"
    extra: str = "{{}}"
    env: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Recipes:
    """The entries of all files. models: placeholders by model; a value may be a table by dtype."""

    contenders: Mapping[str, Recipe]
    models: Mapping[str, Mapping[str, str | Mapping[str, str]]]


def read_recipes(paths: list[Path]) -> Recipes:
    """Read files in order; a later one replaces contenders and models of the same name. Raises BadFile."""
    contenders: dict[str, Recipe] = {}
    models: dict[str, dict[str, str | Mapping[str, str]]] = {}
    for path in paths:
        try:
            given = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise BadFile(f"{path}: {error}") from None
        if unknown := given.keys() - {"contenders", "models"}:
            raise BadFile(f"{path}: unknown table {min(unknown)}")
        for name, table in given.get("contenders", {}).items():
            contenders[name] = _recipe(f"{path}: contenders.{name}", name, table)
        for name, values in given.get("models", {}).items():
            models.setdefault(name, {}).update(values)
    return Recipes(contenders, models)


def _recipe(where: str, name: str, table: dict[str, Any]) -> Recipe:
    fields = {"server", "ready", "served_model", "extra", "env", "ready_timeout_s"}
    if unknown := table.keys() - fields - QUESTIONS.keys():
        raise BadFile(f"{where}: unknown field {min(unknown)}")
    commands = {question: table[question] for question in QUESTIONS if question in table}
    for command in [*commands.values(), *([table["server"]] if "server" in table else [])]:
        if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
            raise BadFile(f"{where}: a command is a list of words, is {command!r}")
    given = {key: value for key, value in table.items() if key in fields - {"server"}}
    return Recipe(
        name,
        {question: tuple(command) for question, command in commands.items()},
        tuple(table["server"]) if "server" in table else None,
        **given,
    )


class Contender(Protocol):
    """A contender that is ready to be measured, any number of times."""

    @property
    def name(self) -> str: ...

    def ask(self) -> dict[str, Any]:
        """One result as printed. Raises subprocess.SubprocessError, ValueError or ProgramFailed."""


@dataclass(slots=True)
class Command:
    """A contender whose program is started in each round and prints its figures."""

    name: str
    words: list[str]
    env: dict[str, str]
    timeout_s: float

    def ask(self) -> dict[str, Any]:
        with TemporaryDirectory(prefix="llama-bench-") as directory:
            program = Program(self.words, Path(directory) / "output", self.env)
            try:
                program.process.wait(self.timeout_s)
            finally:
                program.end()
            if program.process.returncode:
                raise ValueError(f"status {program.process.returncode}: {program.said(1500)}")
            return last_json((Path(directory) / "output").read_text(errors="replace"))


@dataclass(slots=True)
class Served:
    """A contender whose server runs during all rounds; each round puts the load on it."""

    name: str
    load: Command

    def ask(self) -> dict[str, Any]:
        return self.load.ask()


@contextlib.contextmanager
def contender(recipe: Recipe, question: Question, values: Mapping[str, str], timeout_s: float) -> Iterator[Contender]:
    """`recipe` ready to answer `question`; its server runs inside the context. Raises BadFile, ProgramFailed."""
    env = {name: _fill(recipe.name, text, values) for name, text in recipe.env.items()}
    if question.name in recipe.commands:
        words = [_fill(recipe.name, word, values) for word in recipe.commands[question.name]]
        yield Command(recipe.name, words, env, timeout_s)
        return
    if recipe.server is None or question.load is None:
        raise BadFile(f"{recipe.name} has neither a command for {question.name} nor a server")
    with running_server(recipe, values) as server:
        words = [
            *(sys.executable, "-m", "benchmarks", "online", "--url", server.url, "--repeats", "1"),
            *("--model", server.model, "--extra", server.extra, "--vocab-size", values["vocab_size"]),
            *(_fill(recipe.name, word, values) for word in question.load),
        ]
        yield Served(recipe.name, Command(recipe.name, words, {}, timeout_s))


@dataclass(frozen=True, slots=True)
class Server:
    """A running server of a contender: its address without /v1, its name for the model, further fields of a request as JSON."""

    name: str
    url: str
    model: str
    extra: str


@contextlib.contextmanager
def running_server(recipe: Recipe, values: Mapping[str, str]) -> Iterator[Server]:
    """The contender's server, ready for requests; it has ended when the context is left. Raises BadFile, ProgramFailed."""
    if recipe.server is None:
        raise BadFile(f"{recipe.name} has no server")
    env = {name: _fill(recipe.name, text, values) for name, text in recipe.env.items()}
    with TemporaryDirectory(prefix="llama-bench-") as directory:
        port = free_port()
        here = {**values, "port": str(port), "directory": directory}
        url = f"http://127.0.0.1:{port}"
        program = Program([_fill(recipe.name, word, here) for word in recipe.server], Path(directory) / "output", env)
        try:
            program.wait_until_answers(url + recipe.ready, recipe.ready_timeout_s)
            model, extra = _fill(recipe.name, recipe.served_model, here), _fill(recipe.name, recipe.extra, here)
            yield Server(recipe.name, url, model, extra)
        finally:
            program.end()


def values_for(recipes: Recipes, model: str, dtype: str, given: Mapping[str, str]) -> dict[str, str]:
    """The values of a command's placeholders: `given`, those of the model, and those of this machine."""
    quantized = dtype in QUANTIZED
    here = {
        "python": sys.executable,
        "repository": str(REPOSITORY),
        "cores": str(len(os.sched_getaffinity(0))),
        "model": model,
        "dtype": "bfloat16" if quantized else dtype,
        "quantization": dtype if quantized else "none",
        "vocab_size": "32000",
    }
    own = {
        name: value if isinstance(value, str) else value.get(dtype, "")
        for name, value in recipes.models.get(model, {}).items()
    }
    return here | {name: _fill(f"models.{model}", value, here) for name, value in own.items()} | dict(given)


def _fill(who: str, text: str, values: Mapping[str, str]) -> str:
    try:
        return text.format_map(values)
    except (KeyError, ValueError, IndexError) as error:
        raise BadFile(f"{who}: {text!r} refers to {error}, which has no value") from None
