"""The files of Ray that other users of the machine must not reach."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.local import private_files
from deployments.local.private_files import VARIABLE, keep_files_private, token_variables
from llama_core.errors import ConfigError


@pytest.fixture(autouse=True)
def mask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A umask, a home and temporary files of the test's own."""
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"HOME": str(tmp_path)})
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(private_files, "PARENT", tmp_path)
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_ray_gets_a_directory_that_no_other_user_can_enter(tmp_path: Path) -> None:
    for _ in range(2):  # the second start finds the directory
        keep_files_private()
        assert os.environ[VARIABLE] == str(tmp_path / f"llama-ray-{os.getuid()}")
        assert mode(Path(os.environ[VARIABLE])) == 0o700
    (tmp_path / "log").touch()
    assert mode(tmp_path / "log") == 0o600, "Ray's processes inherit the umask"


def test_an_existing_token_becomes_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (tmp_path / ".ray").mkdir()
    token = tmp_path / ".ray" / "auth_token"
    token.touch(mode=0o644)
    keep_files_private()
    assert mode(token) == 0o600


@pytest.mark.parametrize("kind", ["shared", "link", "file"])
def test_a_directory_that_others_could_enter_or_replace_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "given"
    match kind:
        case "shared":
            path.mkdir(mode=0o755)
        case "link":
            (tmp_path / "target").mkdir(mode=0o700)
            path.symlink_to(tmp_path / "target")
        case "file":
            path.touch(mode=0o600)
    os.environ[VARIABLE] = str(path)
    with pytest.raises(ConfigError, match=f"{VARIABLE}: {path} "):
        keep_files_private()


@pytest.mark.parametrize("home", ["", "missing", "file/home"])
def test_a_home_that_cannot_have_rays_token_leaves_it_to_the_commands_own_directory(tmp_path: Path, home: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "own").mkdir()
    os.environ["HOME"] = str(tmp_path / home)
    variables = token_variables(tmp_path / "own")
    if not home:
        assert variables == {} and not (tmp_path / "own" / "auth_token").exists()
    else:
        token = Path(variables["RAY_AUTH_TOKEN_PATH"])
        assert len(token.read_text()) == 64 and token.parent == tmp_path / "own"


def test_a_token_in_a_home_that_cannot_be_written_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("token")
    monkeypatch.setattr(os, "access", lambda path, how: how == os.R_OK)  # root may write everywhere
    assert token_variables(tmp_path) == {}
    (tmp_path / ".ray" / "auth_token").unlink()
    monkeypatch.setattr(os, "access", lambda path, how: False)
    assert token_variables(tmp_path) != {}
