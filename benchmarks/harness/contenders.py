"""The contenders of a paired run, read from TOML files: ours from ours.toml, peers from the user's file.

A contender is a command that prints its figures as a line of JSON, or a server that gets the same load as the others.
Placeholders between braces in a command are replaced: see peers.example.toml.
"""

import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.common import REPOSITORY, last_json
from benchmarks.harness.programs import Program, free_port
from llama_core.model.weight_formats import QUANTIZED


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
    """A recipe that answers `question`. Raises BadFile if it cannot."""

    recipe: Recipe
    question: str
    values: Mapping[str, str]
    timeout_s: float

    def __post_init__(self) -> None:
        if self.question not in self.recipe.commands and not (self.recipe.server and QUESTIONS[self.question].load):
            raise BadFile(f"{self.name} has neither a command for {self.question} nor a server")

    @property
    def name(self) -> str:
        return self.recipe.name

    def ask(self, seed: int) -> dict[str, Any]:
        """One result as printed by its command, or by the load on its server, which runs for this turn alone: an idle server
        would disturb the others, and hold the cores that its ranks are pinned to. seed: of the load's prompts.

        Raises BadFile, ProgramFailed, subprocess.SubprocessError or ValueError.
        """
        values = {**self.values, "python": _python_of(self.recipe.checkout)}
        if command := self.recipe.commands.get(self.question):
            return self._result(self._filled(command, values), self.recipe.checkout)
        with TemporaryDirectory(prefix="llama-bench-") as directory:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            values |= {"port": str(port), "directory": directory, "url": url}
            words = self._filled(self.recipe.server, values)
            server = Program(words, Path(directory) / "output", self._env(values), self.recipe.checkout)
            try:
                server.wait_until_answers(url + self.recipe.ready, self.recipe.ready_timeout_s)
                served, extra = self._filled((self.recipe.served_model, self.recipe.extra), values)
                values |= {"name": served, "extra": extra, "python": sys.executable}
                load = [*self._filled(QUESTIONS[self.question].load, values), "--seed", str(seed)]
                return self._result(load, REPOSITORY)
            finally:
                server.end()

    def _result(self, words: list[str], cwd: Path) -> dict[str, Any]:
        with TemporaryDirectory(prefix="llama-bench-") as directory:
            output = Path(directory) / "output"
            program = Program(words, output, self._env(self.values), cwd)
            try:
                program.process.wait(self.timeout_s)
            finally:
                program.end()
            if program.process.returncode:
                raise ValueError(f"status {program.process.returncode}: {program.said(1500)}")
            return last_json(output.read_text(errors="replace"))

    def _filled(self, words: Sequence[str], values: Mapping[str, str]) -> list[str]:
        return [_fill(self.name, word, values) for word in words]

    def _env(self, values: Mapping[str, str]) -> dict[str, str]:
        return {name: _fill(self.name, text, values) for name, text in self.recipe.env.items()}


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
