"""Keeps the files of a Ray cluster from the other users of the machine.

Ray makes the folders of a session writable for everyone: another user could rename the raylet's socket and listen in its
place. So they go into a folder that only this user can enter. cluster/deploy/start_node.sh does the same in a shell.
"""

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from llama_core.errors import ConfigError

VARIABLE: Final = "RAY_TMPDIR"  # Ray puts its sessions into the folder `ray` of this one
PARENT = Path("/tmp")  # not TMPDIR: of the 107 bytes that a socket's path may have Ray takes 68, Serve and HAProxy 79


def private_directory() -> Path:
    """The directory for Ray's folder of sessions, made where it does not exist. Raises ConfigError for one that other users can
    enter."""
    directory = Path(os.environ.get(VARIABLE) or PARENT / f"llama-ray-{os.getuid()}")
    try:
        tempfile.gettempdir()  # raises where no temporary file can be written
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()  # of a link: another user may change where it leads
    except OSError as error:
        raise ConfigError(f"{VARIABLE}: {directory} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{VARIABLE}: {directory} must be a directory of yours with mode 0700, or other users could replace Ray's sockets. "
            f"Change its mode, or set {VARIABLE} to another directory."
        )
    return directory


def keep_files_private() -> None:
    """For the Ray cluster that this process starts. Sets RAY_TMPDIR, and the umask, which Ray's processes inherit. Raises
    ConfigError as `private_directory` does.
    """
    os.umask(0o077)  # Ray writes a new token and its logs with the mode that the umask leaves
    with suppress(OSError):  # there is no token yet
        _token().chmod(0o600)
    os.environ[VARIABLE] = str(private_directory())


def token_variables(directory: Path) -> dict[str, str]:
    """Variables for the Ray cluster that this process starts. A token in `directory`, where Ray can neither find nor write its
    own in the home directory."""
    with suppress(OSError):
        _token().parent.mkdir(exist_ok=True)
    if os.access(_token(), os.R_OK) or os.access(_token().parent, os.W_OK):
        return {}
    path = directory / "auth_token"
    path.write_text(secrets.token_hex(32))
    return {"RAY_AUTH_TOKEN_PATH": str(path)}


def _token() -> Path:
    return Path.home() / ".ray" / "auth_token"
