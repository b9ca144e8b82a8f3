"""Runs real clients against a server with the demo model, each in an environment of its own.

Every client is a program of this folder that prints a line a check. Constrained decoding makes the demo model follow schemas
and call tools. Environments are made by pip and npm on first use and kept. The exit status is 1 if a check failed.

    python -m tests.programs.clients                     # all, one after another
    python -m tests.programs.clients openai-3 anthropic  # these
    python -m tests.programs.clients --list
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.programs.clients.environments import default_folder, prepared
from tests.programs.clients.table import CLIENTS, Client
from tests.support.programs import REPOSITORY
from tests.support.server import served

FOLDER = Path(__file__).parent
# float32, so that log-probabilities do not depend on the number of ranks. Long prompts of tools fit 2,048 tokens.
SERVER_ARGS = {"max_seq_len": 2048, "dtype": "float32"}


@dataclass(frozen=True, slots=True)
class Result:
    """What one client's program found.

    passed: number of checks. failures: the lines of those that failed, or one line for a program that did not end well.
    skipped: why it did not run; then nothing else is set.
    """

    client: str
    version: str
    passed: int = 0
    failures: tuple[str, ...] = ()
    seconds: float = 0.0
    skipped: str = ""

    @property
    def outcome(self) -> str:
        return "skipped" if self.skipped else "failed" if self.failures else "passed"


def version_of(client: Client) -> str:
    if client.requirements:
        return client.requirements[0]
    return client.needs or ""


def command_of(client: Client, environment: Path) -> list[str]:
    if client.kind == "node":
        # Modules are found from the file's own folder.
        for file in FOLDER.glob("*.mjs"):
            shutil.copy(file, environment)
        return ["node", str(environment / client.program)]
    python = sys.executable if client.kind == "command" else str(environment / "bin" / "python")
    return [python, "-m", f"tests.programs.clients.{client.program}"]


def environment_variables(url: str) -> Mapping[str, str]:
    """Without the keys and addresses that clients read by themselves."""
    private = (
        "OPENAI_",
        "ANTHROPIC_",
        "RAY_",
        "LLAMA_",
        "LANGCHAIN_",
        "LANGSMITH_",
        "HF_",
        "VIRTUAL_ENV",
        "PYTHONPATH",
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(private)}
    return inherited | {
        "CLIENT_SERVER_URL": url,
        "CLIENT_SERVER_PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }


def run_client(name: str, client: Client, url: str, folder: Path) -> Result:
    """Run one client's program. Its lines appear as it prints them; the last lines of its errors where it failed."""
    if client.needs is not None and shutil.which(client.needs) is None:
        return Result(name, version_of(client), skipped=f"{client.needs} is not installed")
    began = time.monotonic()
    try:
        environment = prepared(client, folder)
    except subprocess.CalledProcessError as error:
        return Result(name, version_of(client), failures=(f"the installation failed: {error.output[-1500:]}",))
    lines, errors, status = [], "", 0
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as captured:
        process = subprocess.Popen(
            command_of(client, environment),
            cwd=directory,
            env=environment_variables(url),
            stdout=subprocess.PIPE,
            stderr=captured,
            text=True,
            start_new_session=True,
        )
        with ending(process, client.limit_s) as output:
            for line in output:
                print(f"  {line.rstrip()}", flush=True)
                lines.append(line.rstrip())
        status = process.returncode
        captured.seek(0)
        errors = captured.read()
    passed = sum(line.startswith("ok ") for line in lines)
    failures = [line for line in lines if line.startswith("FAILED ")]
    if not failures and (status or not passed):
        failures = [f"the program ended with status {status}: {errors[-1500:]}"]
    if failures:
        print(errors[-3000:], file=sys.stderr)
    return Result(name, version_of(client), passed, tuple(failures), time.monotonic() - began)


@contextlib.contextmanager
def ending(process: "subprocess.Popen[str]", limit_s: float) -> Iterator[Iterator[str]]:
    """The lines of the program's output. All of its processes are killed after `limit_s`."""
    watcher = subprocess.Popen(["sh", "-c", f"sleep {limit_s:g}; kill -9 -{process.pid}"], start_new_session=True)
    try:
        assert process.stdout is not None
        yield iter(process.stdout)
        process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(watcher.pid, 9)
        watcher.wait()


def row(result: Result) -> str:
    total = result.passed + len(result.failures)
    return (
        f"{result.client:14} {result.version:34} {result.outcome:8} {result.passed}/{total:<4} {result.seconds:5.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="clients; all without a name")
    parser.add_argument("--list", action="store_true", help="print the clients and what they install")
    parser.add_argument(
        "--keep", type=Path, default=default_folder(), metavar="DIR", help="where environments are kept"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args()
    if options.list:
        for name, client in CLIENTS.items():
            print(f"{name:14} {' '.join(client.requirements) or client.needs}")
        return
    if unknown := set(options.names) - set(CLIENTS):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    results = []
    with served(args=SERVER_ARGS) as server:
        server.wait_ready()
        for name in options.names or CLIENTS:
            print(name, flush=True)
            results.append(run_client(name, CLIENTS[name], server.url, options.keep))
            if results[-1].skipped:
                print(f"  skipped: {results[-1].skipped}")
    print(*map(row, results), sep="\n")
    if options.json:
        rows = [asdict(result) | {"outcome": result.outcome, "seconds": round(result.seconds, 1)} for result in results]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    raise SystemExit(any(result.failures for result in results))


if __name__ == "__main__":
    main()
