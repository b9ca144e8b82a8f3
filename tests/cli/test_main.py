"""The installed command `llama-ray`: its options, their environment variables, units of numbers, and help."""

import importlib
import os
import pwd
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli import main
from cli.main import app
from deployments.local import up
from tests.support.programs import REPOSITORY, environment

COMMANDS: Mapping[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
RUNS = {
    "up": "deployments.local.up.serve",
    **{name: f"cli.{name}.run" for name in ("estimate", "chat", "batch")},
}
# That the server or another library reads too.
SHARED = {
    ("up", "model"): ["LLAMA_RAY_UP_CONFIG", "LLAMA_RAY_CONFIG"],
    ("estimate", "ckpt"): ["LLAMA_CKPT_DIR"],
    **{(command, "--api-key"): ["LLAMA_RAY_API_KEY", "OPENAI_API_KEY"] for command in ("chat", "batch")},
    **{
        ("chat", f"--{name}"): [f"LLAMA_RAY_{name.replace('-', '_').upper()}"]
        for name in ["url", "model", "system", "temperature", "top-p", "max-tokens", "seed"]
    },
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("applications: [{name: llama}]")
    return path


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
        calls.extend(args)
        calls.extend(more.items())
        return 0

    module, _, name = RUNS[words[0]].rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), name, run)
    done = CliRunner().invoke(app, list(words), env=variables)
    assert done.exit_code == 0, done.output
    return calls


def test_up_serves_or_checks_the_file_with_its_overrides(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def call(*args: Any, **more: Any) -> int:
        calls.append((*args, *more.values()))
        return 3

    monkeypatch.setattr(up, "serve", call)
    monkeypatch.setattr(up, "check", call)
    assert CliRunner().invoke(app, ["up", str(config)]).exit_code == 3
    assert CliRunner().invoke(app, ["up", str(config), "-v", "seed=2", "dtype=float32"]).exit_code == 3
    assert CliRunner().invoke(app, ["up", str(config), "seed=2", "--check"]).exit_code == 3
    assert CliRunner().invoke(app, ["up", str(config), "--replace"]).exit_code == 3
    file = str(config)
    plain = [(file, [], False, False), (file, ["seed=2", "dtype=float32"], True, False)]
    assert calls == [*plain, (file, ["seed=2"], False), (file, [], False, True)]


PROGRAM = """
import os, sys
from pathlib import Path
from cli.main import _complete_environment
_complete_environment()
assert all(os.path.samefile(f"/proc/self/fd/{number}", os.devnull) for number in (0, 1))
assert open(os.devnull).fileno() > 2
print("nowhere", flush=True)
sys.stdout.flush()
print(Path.home(), file=sys.stderr)
"""


def test_a_command_whose_streams_are_closed_has_streams(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, PROGRAM]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(HOME="/home/of"), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "/home/of\n")


def test_a_user_without_a_home_has_one_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("HOME", None)
    main._complete_environment()
    assert os.environ["HOME"] == pwd.getpwuid(os.getuid()).pw_dir
    os.environ["HOME"] = ""
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    main._complete_environment()
    assert os.environ["HOME"] == "/nonexistent"


def test_a_deleted_working_directory_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = ["sh", "-c", 'cd "$1" && rmdir "$1" && exec "$0" -m cli --version', sys.executable, str(gone)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("llama-ray: the working directory cannot be used: No such file or directory; change")


def test_settings_without_a_configuration_file_are_over_that_of_the_environment(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["up", "http_options.port=1", "ckpt_dir=hf://a//b"]
    assert invoke(monkeypatch, *words, LLAMA_RAY_CONFIG=str(config))[:2] == [str(config), words[1:]]
    for variables, says in (
        ({"LLAMA_RAY_CONFIG": f"{config}.absent"}, "does not exist"),
        ({"LLAMA_RAY_UP_CONFIG": "absent"}, "not a model's name"),
        ({}, "'http_options.port=1' is a setting"),
    ):
        done = CliRunner().invoke(app, words, env=variables)
        assert done.exit_code == 2 and says in done.output


WRONG_URLS = (
    "Hello",
    "--url ftp://x",
    "--url nonsense",
    "--url http://[::1",
    "--url http://a\u00a0b/é",
    "-q a --url http://x:99999",
)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("estimate demo --ranks x", "must be a whole number"),
        ("estimate demo --gpu h9", "must be one of rtx3090"),
        ("estimate max_seq_len=5", "Write it as an option: --max-seq-len 5"),
        ("estimate demo max_seq_len=5", "Write it as an option: --max-seq-len 5"),
        ("chat http://127.0.0.1:1 port=1", "KEY=VALUE is for up"),
        ("chat --temperature 9", "must be at most 2"),
        *((f"chat {words}", "the URL must be like http://127.0.0.1:8000") for words in WRONG_URLS),
        ("up pyproject.toml seed", "'seed' is not of the form KEY=VALUE"),
        ("up pyproject.toml =2", "'=2' is not of the form KEY=VALUE"),
        ("up absent.yaml", "file 'absent.yaml' does not exist"),
        ("up " + "a" * 300, "does not exist"),  # longer than a file's name may be
    ],
)
def test_wrong_usage_has_status_2_and_words_of_our_own(words: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    done = CliRunner().invoke(app, words.split(" "))
    shown = " ".join(done.output.split())
    assert done.exit_code == 2 and says in shown, shown
    assert not any(theirs in shown for theirs in ("Value error", "Input should", "Traceback"))


def test_every_option_has_the_variables_that_the_rule_names_and_help_shows_them() -> None:
    seen = 0
    for command, option, parameter in options():
        name = f"LLAMA_RAY_{command}_{option.removeprefix('--')}".replace("-", "_").upper()
        assert parameter.envvar == [name, *SHARED.get((command, option), [])], (command, option)
        assert all(variable in help_of(command) for variable in parameter.envvar), (command, option)
        seen += 1
    assert seen > 25 and set(COMMANDS) == set(RUNS)


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ("up", {"LLAMA_RAY_UP_VERBOSE": "1", "LLAMA_RAY_CONFIG": "{root}/serve_config.yaml"}, [("verbose", True)]),
        (
            "estimate",
            {
                "LLAMA_CKPT_DIR": "{root}/demo",
                "LLAMA_RAY_ESTIMATE_BATCH": "2k",
                "LLAMA_RAY_ESTIMATE_KV_CACHE_BYTES": "4GiB",
                "LLAMA_RAY_ESTIMATE_JSON": "true",
            },
            [{"kv_cache_bytes": 4 * 2**30, "max_batch_size": 2000}, ("as_json", True)],
        ),
        ("chat", {"LLAMA_RAY_CHAT_QUESTION": "Hi?", "LLAMA_RAY_MAX_TOKENS": "1k"}, ["Hi?", ("max_tokens", 1000)]),
        ("chat", {"LLAMA_RAY_CHAT_MAX_TOKENS": "8Ki", "LLAMA_RAY_MAX_TOKENS": "1k"}, [("max_tokens", 8192)]),
        (
            "batch LICENSE -o out demo",
            {"LLAMA_RAY_BATCH_IN_FLIGHT": "1k"},
            [Path("LICENSE"), Path("out"), "demo", 1000],
        ),
        ("chat --max-tokens 9", {"LLAMA_RAY_CHAT_MAX_TOKENS": "8Ki"}, [("max_tokens", 9)]),
    ],
)
def test_options_come_from_the_command_line_else_their_variable_else_a_shared_one(
    words: str, variables: dict[str, str], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {name: value.format(root=REPOSITORY) for name, value in variables.items()}
    calls = invoke(monkeypatch, *words.split(), **given)
    assert all(value in calls for value in expected), calls


def test_the_package_installs_the_command_with_its_version() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"llama-ray": "cli.main:main"}
    assert "$(BIN)/llama-ray up $(CONFIG)" in (REPOSITORY / "Makefile").read_text()
    assert CliRunner().invoke(app, ["--version"]).output.strip() == project["version"]


def test_make_serve_takes_the_model_from_its_own_command_line_only() -> None:
    def shown(*words: str, **variables: str) -> str:
        make = ["make", "-n", "serve", *words]
        given = os.environ | variables
        return subprocess.run(make, cwd=REPOSITORY, env=given, capture_output=True, text=True, check=True).stdout

    assert "fetch_model" not in shown(MODEL="of-another-program")
    assert "fetch_model 'a b; c'" in shown("MODEL=a b; c")


@pytest.mark.parametrize(
    "words",
    [
        ["up", "--help"],
        ["estimate", "--help"],
        ["batch", "--help"],
        ["--help"],
        ["chat", "-q", "Hi", "--url", "http://127.0.0.1:9"],
    ],
)
def test_help_and_chat_import_neither_ray_nor_torch(words: list[str]) -> None:
    program = (
        f"import sys\nfrom cli.main import main\nsys.argv = ['llama-ray', *{words}]\n"
        "try: main()\nexcept SystemExit: pass\nprint('IMPORTED', *sorted({'ray', 'torch', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=True
    )
    assert "Usage" in done.stdout or "cannot be reached" in done.stderr
    assert done.stdout.splitlines()[-1] == "IMPORTED"
