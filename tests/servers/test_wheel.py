"""The wheel has all that a server needs: it is installed into an environment outside of the repository, and serves there."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml

from benchmarks.harness.programs import free_port
from tests.programs.empty_environment import commands
from tests.support import http
from tests.support.programs import REPOSITORY, environment
from tests.support.rooms import PRODUCT
from tests.support.server import CHAT, served
from tests.support.wheels import built_wheel, tracked_files

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and with the dependencies of this one, but not with its editable installation."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)
    return folder


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The engine is compiled anew, fast, into a folder of its own."""
    return {"PYTHONPATH": "", "LLAMA_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "LLAMA_CXXFLAGS": "-O0"}


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    expected = {name for name in tracked_files() if name.split("/")[0] in PRODUCT}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == expected and "deployments/demo/consolidated.00.pth" in found


def test_the_readme_installs_this_wheel_and_the_torch_of_the_tests(wheel: Path) -> None:
    install, _ = commands()
    (torch,) = re.findall("^torch==.*", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert install.split()[2:4] == [f"{torch}+cpu", wheel.name]


def test_the_installed_command_has_its_files_in_any_folder(
    installed: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    def output(program: str, *words: str) -> str:
        command = [str(installed / "bin" / program), *words]
        env = environment(**variables)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    places = output("python", "-c", f"import {','.join(PRODUCT)} as last; print(*last.__path__)")
    (packages,) = installed.glob("lib/python*/site-packages")
    assert places.strip() == str(packages / "cli")
    assert output("llama-ray", "--version") == "0.1.0\n"
    demo = str(packages / "deployments" / "demo")
    assert json.loads(output("llama-ray", "estimate", "demo", "--json"))["checkpoint"] == demo
    config = {"applications": [{"import_path": "deployments.app:build_app", "args": {"ckpt_dir": "demo"}}]}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    assert demo in output("llama-ray", "up", "my.yaml", "--check", f"http_options.port={free_port()}")
    assert variables["LLAMA_CACHE_DIR"] in output("python", "-m", "llama_core.backends.native")
    scripts = list((packages / "cluster" / "deploy").glob("*.sh"))
    assert len(scripts) == 3 and all(os.access(script, os.X_OK) for script in scripts)


def test_the_installed_command_serves_in_any_folder(installed: Path, variables: dict[str, str], tmp_path: Path) -> None:
    command = [str(installed / "bin" / "llama-ray"), "up"]
    with served(command=command, args={"spare_ranks": False}, env=variables, cwd=tmp_path) as server:
        server.wait_ready()
        body = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}
        answer = http.post(server.url + CHAT, json=body, timeout=60).json()
        assert "demo model" in answer["choices"][0]["message"]["content"]
        assert [http.get(server.url + path, timeout=60).status_code for path in ("/", "/docs")] == [200, 200]
        ranks = [pid for pid, command in server.processes().items() if command.startswith("ray::RankWorker")]
        mapped = [variables["LLAMA_CACHE_DIR"] in Path(f"/proc/{pid}/maps").read_text() for pid in ranks]
        assert mapped == [True, True], "the engine was compiled from the wheel"
