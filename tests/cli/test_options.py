"""The options of every command: their environment variables, units of numbers, and help."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from functools import cache
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli.main import app
from tests.support.programs import REPOSITORY

COMMANDS: Mapping[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
RUNS = {
    "up": "deployments.local.up.serve_file",
    "doctor": "cli.doctor.command.run",
    **{name: f"cli.{name}.run" for name in ("estimate", "chat", "bench", "capture", "replay", "env")},
}
# That more than one command reads, or that the server reads too.
SHARED = {
    "up": {"config": "LLAMA_RAY_CONFIG"},
    "doctor": {"config": "LLAMA_RAY_CONFIG", "--digests": "LLAMA_RAY_DIGESTS"},
    "estimate": {"ckpt": "LLAMA_CKPT_DIR"},
    **{
        command: {f"--{name}": f"LLAMA_RAY_{name.replace('-', '_').upper()}" for name in names.split()}
        for command, names in {
            "chat": "url model system temperature top-p max-tokens seed api-key",
            "bench": "url model endpoint concurrency requests warmup prompt-tokens max-tokens temperature ignore-eos seed "
            "timeout api-key",
            "capture": "url api-key",
            "replay": "url api-key",
        }.items()
    },
}


UNITS = ("TOKENS", "SIZE", "COUNT")
COUNTS_OF_FEW = {("estimate", "--ranks")}


def options() -> Iterator[tuple[str, str, Any]]:
    """The command, the long name and the parameter of each option and argument, without KEY=VALUE."""
    for command, found in COMMANDS.items():
        for parameter in found.params:
            if parameter.name == "overrides":
                assert parameter.nargs == -1
                continue
            long = [name for name in parameter.opts if name.startswith("--")]
            yield command, (long or parameter.opts)[0], parameter


@cache
def help_of(*command: str) -> str:
    """On a terminal of 80 columns."""
    return CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"}).output


def invoke(monkeypatch: pytest.MonkeyPatch, *words: str, **variables: str) -> list[Any]:
    """The arguments with which a command calls the function that does its work."""
    calls: list[Any] = []

    def run(*args: Any, **more: Any) -> int:
        calls.extend(part for arg in args for part in (asdict(arg).values() if is_dataclass(arg) else [arg]))  # type: ignore[arg-type]
        calls.extend(more.items())
        return 0

    module, _, name = RUNS[words[0]].rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), name, run)
    done = CliRunner().invoke(app, list(words), env=variables)
    assert done.exit_code == 0, done.output
    return calls


def test_every_option_has_the_variable_that_the_rule_names_and_help_shows_it() -> None:
    seen = 0
    for command, option, parameter in options():
        name = f"LLAMA_RAY_{command}_{option.removeprefix('--')}".replace("-", "_").upper()
        assert parameter.envvar[0] == name, (command, option)
        assert all(variable in help_of(command) for variable in parameter.envvar), (command, option)
        seen += 1
    assert seen > 55 and set(COMMANDS) == set(RUNS)


def test_variables_that_several_commands_or_the_server_share_are_read_too() -> None:
    shared = {(command, option): names for command, found in SHARED.items() for option, names in found.items()}
    for command, option, parameter in options():
        expected = [shared[command, option]] if (command, option) in shared else []
        if option == "--api-key":
            expected.append("OPENAI_API_KEY")
        assert parameter.envvar[1:] == expected, (command, option)


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ("up", {"LLAMA_RAY_UP_VERBOSE": "1", "LLAMA_RAY_CONFIG": "{root}/serve_config.yaml"}, [("verbose", True)]),
        ("doctor", {"LLAMA_RAY_DIGESTS": "0", "LLAMA_RAY_DOCTOR_JSON": "1"}, [("reads_files", False), ("as_json", True)]),
        (
            "estimate",
            {
                "LLAMA_CKPT_DIR": "{root}/demo",
                "LLAMA_RAY_ESTIMATE_GPU": "h100",
                "LLAMA_RAY_ESTIMATE_KV_CACHE_BYTES": "4GiB",
                "LLAMA_RAY_ESTIMATE_JSON": "true",
            },
            ["h100", {"kv_cache_bytes": 4 * 2**30}, ("as_json", True)],
        ),
        ("chat", {"LLAMA_RAY_CHAT_QUESTION": "Hi?", "LLAMA_RAY_MAX_TOKENS": "1k"}, ["Hi?", 1000]),
        (
            "bench",
            {
                "LLAMA_RAY_BENCH_WARMUP": "0",
                "LLAMA_RAY_BENCH_REQUESTS": "2k",
                "LLAMA_RAY_PROMPT_TOKENS": "16Ki",
                "LLAMA_RAY_TIMEOUT": "3.5",
            },
            [0, 2000, 16384, 3.5],
        ),
        (
            "capture",
            {"LLAMA_RAY_CAPTURE_PROMPT": "Once", "LLAMA_RAY_CAPTURE_SET": "max_tokens=1k user=me"},
            ["Once", ["max_tokens=1k", "user=me"]],
        ),
        ("env", {"LLAMA_RAY_ENV_JSON": "1"}, [("as_json", True)]),
    ],
)  # fmt: skip
def test_options_come_from_the_environment(
    words: str, variables: dict[str, str], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {name: value.format(root=REPOSITORY) for name, value in variables.items()}
    calls = invoke(monkeypatch, words, **given)
    assert all(value in calls for value in expected), calls


def test_the_command_line_wins_over_a_commands_own_variable_and_that_over_a_shared_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = {"LLAMA_RAY_MAX_TOKENS": "7"}
    own = shared | {"LLAMA_RAY_BENCH_MAX_TOKENS": "8k"}
    assert 7 in invoke(monkeypatch, "bench", **shared)
    assert 8000 in invoke(monkeypatch, "bench", **own) and 8000 not in invoke(monkeypatch, "chat", **own)
    assert 9 in invoke(monkeypatch, "bench", "--max-tokens", "9", **own)


def test_every_number_of_tokens_bytes_or_requests_takes_a_unit() -> None:
    sized = {
        (command, option) for command, option, parameter in options() if parameter.metavar in UNITS
    } - COUNTS_OF_FEW
    assert len(sized) == 10
    for command, option in sized:
        refused = CliRunner().invoke(app, [command, option, "8x"]).output
        line = " ".join(refused.split())
        assert "must be a whole number such as 4096, 8k" in line and "(env var: 'LLAMA_RAY_" in line, line


def test_no_help_is_cut_off_and_each_has_examples() -> None:
    assert not any(line.endswith("...") for line in help_of().splitlines()[1:])
    for command in COMMANDS:
        text = help_of(command)
        assert f"Examples:\n    llama-ray {command}" in text and "…" not in text
        assert max(map(len, text.splitlines())) <= 82, command
