"""The contenders of a paired run, read from TOML files: ours from ours.toml, peers from the user's file.

A contender is a command that prints its figures as a line of JSON, or a server that gets the same load as the others.
Placeholders between braces in a command are replaced: see peers.example.toml.
"""

import contextlib
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.common import REPOSITORY, last_json
from benchmarks.harness.programs import Program, free_port
from llama_core.execution.weight_formats.registry import QUANTIZED


class BadFile(Exception):
    """A contender's file is invalid; the message names the place."""


@dataclass(frozen=True, slots=True)
class Question:
    """figures: their names in a result. defaults: of placeholders. load: the command that puts the load on a server; none if
    only a contender's own command can answer."""

    figures: tuple[str, ...]
    defaults: Mapping[str, str]
    load: tuple[str, ...] = ()


_ONLINE = ("{python}", "-m", "benchmarks", "online", "--url", "{url}", "--model", "{name}", "--extra", "{extra}",
           "--repeats", "1", "--vocab-size", "{vocab_size}", "--requests", "{requests}")  # fmt: skip
_LENGTHS = ("--prompt", "{prompt}", "--output", "{output}")
QUESTIONS = {
    "decode": Question(
        ("decode_tok_s",),
        {"prompt": "128", "output": "128", "requests": "3"},
        (*_ONLINE, *_LENGTHS, "--concurrency", "1"),
    ),
    "prefill": Question(("prefill_tok_s",), {"prompt": "512"}),
    "offline": Question(("output_tok_s",), {"requests": "32"}, (*_ONLINE, "--mixed", "--concurrency", "{requests}")),
    "online": Question(
        ("output_tok_s", "ttft_p50_ms", "ttft_p99_ms", "between_p50_ms", "between_p99_ms"),
        {"prompt": "128", "output": "64", "requests": "64", "concurrency": "8"},
        (*_ONLINE, *_LENGTHS, "--concurrency", "{concurrency}"),
    ),
    "arrivals": Question(
        ("output_tok_s", "ttft_p50_ms", "ttft_p99_ms", "per_token_p50_ms", "per_token_p99_ms"),
        {"prompt": "128", "output": "64", "requests": "200", "rate": "6"},
        (
            *("{bench_python}", "-m", "benchmarks.peers.vllm_bench", "--url", "{url}", "--model", "{name}"),
            *("--tokenizer", "{hf}", "--rate", "{rate}", "--requests", "{requests}", *_LENGTHS),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One contender's entry in a file. commands: by question. server: for the questions without a command."""

    name: str
    commands: Mapping[str, Sequence[str]]
    server: Sequence[str] = ()
    ready: str = "/health"
    served_model: str = "{model}"
    extra: str = "{{}}"
    env: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 300.0
    checkout: Path = REPOSITORY  # where its commands run


@dataclass(frozen=True, slots=True)
class Recipes:
    """The entries of all files. models: placeholders by model; a value may be a table by dtype."""

    contenders: Mapping[str, Recipe]
    models: Mapping[str, Mapping[str, str | Mapping[str, str]]]


def read_recipes(paths: Sequence[Path]) -> Recipes:
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
        for name, entry in given.get("contenders", {}).items():
            contenders[name] = _recipe(f"{path}: contenders.{name}", name, entry)
        for name, values in given.get("models", {}).items():
            models.setdefault(name, {}).update(values)
    return Recipes(contenders, models)


def _recipe(where: str, name: str, entry: dict[str, Any]) -> Recipe:
    commands = {question: entry.pop(question) for question in QUESTIONS if question in entry}
    for command in [*commands.values(), entry.get("server", [])]:
        if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
            raise BadFile(f"{where}: a command is a list of words, is {command!r}")
    if unknown := entry.keys() - {"server", "ready", "served_model", "extra", "env", "ready_timeout_s"}:
        raise BadFile(f"{where}: unknown field {min(unknown)}")
    return Recipe(name, commands, **entry)


@dataclass(frozen=True, slots=True)
class Contender:
    """A command that prints the figures of its contender; `is_load`: of its server, which runs already."""

    name: str
    words: Sequence[str]
    env: Mapping[str, str]
    checkout: Path
    timeout_s: float
    is_load: bool = False

    def ask(self, seed: int) -> dict[str, Any]:
        """One result as printed. A server that has seen a prompt may have cached it, so each load takes another seed.

        Raises subprocess.SubprocessError or ValueError.
        """
        words = [*self.words, *(["--seed", str(seed)] if self.is_load else [])]
        with TemporaryDirectory(prefix="llama-bench-") as directory:
            output = Path(directory) / "output"
            program = Program(words, output, dict(self.env), self.checkout)
            try:
                program.process.wait(self.timeout_s)
            finally:
                program.end()
            if program.process.returncode:
                raise ValueError(f"status {program.process.returncode}: {program.said(1500)}")
            return last_json(output.read_text(errors="replace"))


@contextlib.contextmanager
def contender(recipe: Recipe, question: str, values: Mapping[str, str], timeout_s: float) -> Iterator[Contender]:
    """`recipe` ready to answer `question`; its server runs inside the context. Raises BadFile, ProgramFailed."""
    values = {**values, "python": _python_of(recipe.checkout)}
    env = {name: _fill(recipe.name, text, values) for name, text in recipe.env.items()}
    if question in recipe.commands:
        words = [_fill(recipe.name, word, values) for word in recipe.commands[question]]
        yield Contender(recipe.name, words, env, recipe.checkout, timeout_s)
        return
    load = QUESTIONS[question].load
    if not (recipe.server and load):
        raise BadFile(f"{recipe.name} has neither a command for {question} nor a server")
    with TemporaryDirectory(prefix="llama-bench-") as directory:
        port = free_port()
        here = {**values, "port": str(port), "directory": directory}
        words = [_fill(recipe.name, word, here) for word in recipe.server]
        url = f"http://127.0.0.1:{port}"
        program = Program(words, Path(directory) / "output", env, recipe.checkout)
        try:
            program.wait_until_answers(url + recipe.ready, recipe.ready_timeout_s)
            here |= {"url": url, "name": _fill(recipe.name, recipe.served_model, here), "python": sys.executable}
            here["extra"] = _fill(recipe.name, recipe.extra, here)
            words = [_fill(recipe.name, word, here) for word in load]
            yield Contender(recipe.name, words, {}, REPOSITORY, timeout_s, is_load=True)
        finally:
            program.end()


def _python_of(checkout: Path) -> str:
    """The interpreter of another checkout's virtual environment, where it has one."""
    own = checkout / ".venv" / "bin" / "python"
    return str(own) if checkout != REPOSITORY and own.exists() else sys.executable


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
