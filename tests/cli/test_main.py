"""The installed command `llama-ray`."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.harness.programs import free_port
from cli.doctor import command as doctor
from cli.main import app
from deployments.local import up
from tests.support.programs import REPOSITORY, environment


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("applications: [{name: llama}]")
    return path


def test_up_serves_the_file_with_its_overrides(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, list[str], bool]] = []

    def serve_file(path: Path, overrides: list[str], *, verbose: bool) -> int:
        calls.append((path, list(overrides), verbose))
        return 3

    monkeypatch.setattr(up, "serve_file", serve_file)
    assert CliRunner().invoke(app, ["up", str(config)]).exit_code == 3
    assert CliRunner().invoke(app, ["up", str(config), "-v", "seed=2", "dtype=float32"]).exit_code == 3
    assert calls == [(config, [], False), (config, ["seed=2", "dtype=float32"], True)]


def test_version_is_that_of_the_package() -> None:
    done = CliRunner().invoke(app, ["--version"])
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert (done.exit_code, done.output.strip()) == (0, declared)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["up", str(tmp_path / "absent.yaml")])
    assert done.exit_code == 2 and "does not exist" in " ".join(done.output.replace("│", " ").split())


def test_settings_without_a_configuration_file_are_over_that_of_the_environment_or_the_defaults(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Path | None, list[str]]] = []

    def run(path: Path | None, overrides: list[str], **_: object) -> int:
        calls.append((path, list(overrides)))
        return 0

    monkeypatch.setattr(up, "serve_file", run)
    monkeypatch.setattr(doctor, "run", run)
    words = ["http_options.port=1", "ckpt_dir=hf://a//b"]
    for command in ("up", "doctor"):
        done = CliRunner().invoke(app, [command, *words], env={"LLAMA_RAY_CONFIG": str(config)})
        assert done.exit_code == 0, done.output
        done = CliRunner().invoke(app, [command, *words], env={"LLAMA_RAY_CONFIG": str(config) + ".absent"})
        assert done.exit_code == 2 and "does not exist" in done.output
        done = CliRunner().invoke(app, [command, *words], env={"LLAMA_RAY_CONFIG": str(config.parent)})
        assert done.exit_code == 2 and "is a directory" in done.output
    assert CliRunner().invoke(app, ["doctor", *words]).exit_code == 0
    assert calls == [(config, words), (config, words), (None, words)]
    done = CliRunner().invoke(app, ["up", *words])
    assert (
        done.exit_code == 2
        and "'http_options.port=1' is a setting" in done.output
        and "serve_config.yaml" in done.output
    )


def test_a_file_with_an_equals_sign_in_its_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, list[str]]] = []

    def serve_file(path: Path, overrides: list[str], *, verbose: bool) -> int:
        calls.append((path, list(overrides)))
        return 0

    monkeypatch.setattr(up, "serve_file", serve_file)
    monkeypatch.chdir(tmp_path)
    Path("ranks=2").write_text("applications: [{name: llama}]")
    assert CliRunner().invoke(app, ["up", "ranks=2", "seed=3"]).exit_code == 0
    assert calls == [(Path("ranks=2"), ["seed=3"])]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("estimate demo --ranks x", "must be a whole number"),
        ("estimate demo --gpu h9", "must be one of rtx3090"),
        ("estimate max_seq_len=5", "Write it as an option: --max-seq-len 5"),
        ("estimate demo max_seq_len=5", "Write it as an option: --max-seq-len 5"),
        ("env port=1", "KEY=VALUE is for up and doctor"),
        ("chat --temperature 9", "must be at most 2"),
        ("bench --timeout soon", "must be a number"),
        ("bench --url ftp://x", "the URL must be like http://127.0.0.1:8000"),
        ("bench --url nonsense", "the URL must be like http://127.0.0.1:8000"),
        ("bench --url http://[::1", "the URL must be like http://127.0.0.1:8000"),
        ("bench --url http://a\u00a0b/é", "the URL must be like http://127.0.0.1:8000"),
        ("chat -q a --url http://x:99999", "the URL has no valid port"),
        ("up pyproject.toml seed", "'seed' is not of the form KEY=VALUE"),
        ("doctor pyproject.toml =2", "'=2' is not of the form KEY=VALUE"),
        ("doctor absent.yaml", "file 'absent.yaml' does not exist"),
        ("doctor " + "a" * 300, "does not exist"),  # longer than a file's name may be
    ],
)
def test_wrong_usage_has_status_2_and_words_of_our_own(words: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    done = CliRunner().invoke(app, words.split(" "))
    shown = " ".join(done.output.split())
    assert done.exit_code == 2 and says in shown, shown
    assert not any(theirs in shown for theirs in ("Value error", "Input should", "Traceback"))


@pytest.mark.parametrize(
    ("setting", "status", "says"),
    [
        ("seed", 2, "'seed' is not of the form key=value"),
        ("http_options.nosuch=1", 2, "http_options.nosuch: no such argument"),
        ("http_options.port=99999", 2, "http_options.port: must be a whole number from 1 to 65535"),
        ("max_sequence=5", 2, "max_sequence: no such argument; did you mean max_seq_len?"),
        ("max_seq_len=x", 2, "max_seq_len: must be"),
        ("max_seq_len=", 2, "max_seq_len: has no value"),
        ("max_batch_size=null", 2, "max_batch_size: must be a whole number"),
        ("ckpt_dir=/nowhere", 1, "/nowhere"),
    ],
)
def test_a_setting_that_cannot_be_served_ends_up_with_one_line(
    setting: str, status: int, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Status 2 for what is wrong with the setting itself, 1 for what is found with its help."""
    config = tmp_path / "config.yaml"
    config.write_text(
        f"http_options: {{host: 127.0.0.1, port: {free_port()}}}\n"
        "applications: [{name: llama, import_path: 'deployments.app:build_app'}]"
    )
    assert up.serve_file(config, [setting]) == status
    shown = capfd.readouterr().err
    assert shown.startswith(says) or status == 1, shown
    assert says in shown and shown.count("\n") == 1


def test_the_package_installs_the_command() -> None:
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"llama-ray": "cli.main:main"}
    assert "$(BIN)/llama-ray up $(CONFIG)" in (REPOSITORY / "Makefile").read_text()


def test_make_serve_takes_the_model_from_its_own_command_line_only() -> None:
    def shown(*words: str, **variables: str) -> str:
        make = ["make", "-n", "serve", *words]
        given = os.environ | variables
        return subprocess.run(make, cwd=REPOSITORY, env=given, capture_output=True, text=True, check=True).stdout

    assert "fetch_model" not in shown(MODEL="of-another-program")
    assert "fetch_model 'a b; c'" in shown("MODEL=a b; c")


@pytest.mark.parametrize("command", ["up", "estimate", "doctor", "env", "chat", "bench", "capture", "replay", ""])
def test_help_imports_neither_ray_nor_torch(command: str) -> None:
    program = (
        f"import sys\nfrom cli.main import main\nsys.argv = ['llama-ray', *{command.split()}, '--help']\n"
        "try: main()\nexcept SystemExit: pass\nprint('IMPORTED', *sorted({'ray', 'torch', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=True
    )
    assert "Usage" in done.stdout and done.stdout.splitlines()[-1] == "IMPORTED"


@pytest.mark.parametrize("arguments", [[], ["absent.yaml"]])
def test_the_earlier_name_of_the_command_still_works(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deployments.up", *arguments],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 2 and "usage: llama-ray up CONFIG.yaml" in done.stderr


@pytest.mark.parametrize("words", [["chat", "-q", "Hi"], ["bench"]])
def test_clients_import_neither_ray_nor_torch(words: list[str]) -> None:
    program = (
        f"import sys\nfrom cli.main import main\nsys.argv = ['llama-ray', *{words}, '--url', 'http://127.0.0.1:9']\n"
        "try: main()\nexcept SystemExit: pass\nprint('IMPORTED', *sorted({'ray', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=True
    )
    assert "cannot be reached" in done.stderr and done.stdout.splitlines()[-1] == "IMPORTED"
