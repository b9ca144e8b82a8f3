"""Builds this project's wheel."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.programs import REPOSITORY, output_of


def tracked_files() -> list[str]:
    """Paths of the files under version control."""
    return output_of(["git", "ls-files"]).splitlines()


def built_wheel(folder: Path) -> Path:
    """The wheel, which `python -m build` makes from the source distribution. It is built in a copy, because setuptools leaves
    files beside the sources, and takes up those of former builds."""
    for name in tracked_files():
        (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / "copy" / name, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(command, cwd=folder / "copy", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    return wheel
