"""`python -m tests` runs every test and the linters in lanes, as `make test` does, and reports each lane's time.

The tests of ranks run first, beside the longest and the shortest lanes that compute, because they pin cores that the ranks of a
server would claim. Then three lanes run at a time: one that computes beside two that mostly wait for servers to start, fail and
recover; once the last of these has begun, four, so that no core idles at the end. Lanes that compute have a lower priority,
because Ray and Ray Serve allow a process only seconds to start. A lane prints one line when it ends, and all of its output if
it failed. The last line counts all tests. The exit status is 1 if a lane failed.
Further arguments go to every pytest: --full, as in `make test-full`, adds the tests marked full and the soak.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest")
# The lane of a test file is that of the first path here that contains it; of all others it is "unit".
LANE_OF_PATH = {
    "tests/cluster/driver/test_two_nodes.py": "nodes",
    "tests/servers/test_autoscaling.py": "nodes",
    "tests/servers/test_own_cluster.py": "nodes",
    "tests/servers/test_small_cluster.py": "nodes",
    "tests/servers/test_startup.py": "nodes",
    "tests/servers/test_upgrade.py": "starts",
    "tests/servers/test_serve_faults.py": "starts",
    "tests/servers/test_logs_and_traces.py": "starts",
    "tests/servers/test_required_keys.py": "starts",
    "tests/servers": "servers",
    "tests/chaos/test_chaos.py": "chaos",
    "tests/cluster": "ranks",
    "tests/llama_core": "model",
    "tests/deployments": "replica",
    "tests/benchmarks": "measures",
}
FIRST = ("ranks",)  # before any lane of WAITING
# One at a time while lanes of WAITING are left, two beside those of FIRST; the longest first.
COMPUTING = ("model", "unit", "measures", "replica", "lint")
WAITING = ("servers", "nodes", "starts", "soak", "chaos")  # the longest first
AT_ONCE = 3
NICENESS = 19  # of a lane that computes: less than the workers of Ray have, whose niceness is 15
SOAK = ("--seconds", "15", "--every", "7", "--streams", "2", "--pause", "1")
CXX_FILES = [str(path) for folder in ("llama_core", "benchmarks") for path in sorted((ROOT / folder).rglob("*.[ch]pp"))]
OF_FULL_RUNS = ("soak",)  # with --full, or where they are named
COMMANDS = {
    "lint": (
        (sys.executable, "-m", "ruff", "check", "."),
        (sys.executable, "-m", "ruff", "format", "--check", "."),
        (sys.executable, "-m", "mypy"),
        (str(Path(sys.executable).with_name("clang-format")), "--dry-run", "--Werror", *CXX_FILES),
    ),
    # 15 seconds under load, in which a rank is killed twice.
    "soak": ((sys.executable, "-m", "tests.chaos.soak", *SOAK),),
}
ENDING = re.compile(
    r"^=*\s*(\d+ (?:passed|failed|error|skipped|deselected|no tests ran).* in [\d.]+s.*?)\s*=*$", re.MULTILINE
)
COUNT = re.compile(r"(\d+) (failed|passed|skipped|xfailed|errors?)")
LET_END_S = 120.0  # for all lanes' processes to end after Ctrl-C


@dataclass(slots=True)
class Lane:
    """Commands that run one after the other, and their output."""

    name: str
    commands: Sequence[Sequence[str]]
    output: Path
    env: Mapping[str, str] = field(default_factory=dict)  # added to this process's own
    niceness: int = 0
    seconds: float = 0.0
    status: int | None = None
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def run(self, stopping: threading.Event) -> None:
        """Run the commands until one fails; the others are not started."""
        began = time.monotonic()
        with self.output.open("wb") as output:
            for command in self.commands:
                if stopping.is_set():
                    return
                try:
                    # A session of its own: Ctrl-C reaches the commands once, from this process.
                    self.process = subprocess.Popen(
                        command,
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        env={**os.environ, **self.env},
                    )
                    if self.niceness > os.getpriority(os.PRIO_PROCESS, 0):  # only root may lower a niceness
                        os.setpriority(os.PRIO_PROCESS, self.process.pid, self.niceness)
                    self.status = self.process.wait()
                except OSError as error:
                    output.write(f"{command[0]}: {error}\n".encode())
                    self.status = 127
                if self.status:
                    break
        self.seconds = time.monotonic() - began

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does, so that fixtures end their servers."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def end_by(self, deadline: float) -> None:
        """Kill what still runs at the deadline, in the time of `time.monotonic`."""
        if self.process is not None:
            try:
                self.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.process.kill()

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def ending(self) -> str:
        """The last line of pytest that counts tests, or nothing."""
        found = ENDING.findall(self.text)
        return str(found[-1]) if found else ""


def lane_of(file: str) -> str:
    """The lane of a test file, by its path in the repository."""
    return next((lane for path, lane in LANE_OF_PATH.items() if file == path or file.startswith(path + "/")), "unit")


def files_by_lane() -> dict[str, list[str]]:
    """Every test file by its lane."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = str(path.relative_to(ROOT))
        found.setdefault(lane_of(file), []).append(file)
    return found


def commands(extra: Sequence[str]) -> Mapping[str, Sequence[Sequence[str]]]:
    return {**COMMANDS} | {lane: ((*PYTEST, *files, *extra),) for lane, files in files_by_lane().items()}


def by_default(names: Sequence[str], extra: Sequence[str]) -> list[str]:
    """The lanes of a run that names none."""
    return [name for name in names if name not in OF_FULL_RUNS or "--full" in extra]


def run_lanes(
    first: Sequence[Lane], computing: Sequence[Lane], waiting: Sequence[Lane], stopping: threading.Event, at_once: int
) -> None:
    """Run all lanes, `at_once` at a time, and one more from when the last lane of `waiting` has begun. Lanes of `waiting` run
    after those of `first`, and computing lanes one at a time until no lane of `waiting` is left to start. Beside lanes of
    `first` the last ones of `computing` run too, one after the other."""
    queues = {"first": deque(first), "computing": deque(computing), "waiting": deque(waiting)}
    lock, first_has_ended = threading.Lock(), threading.Event()

    def run_one_of(name: str, take: Callable[[deque[Lane]], Lane] = deque.popleft) -> bool:
        with lock:
            if stopping.is_set() or not queues[name]:
                return False
            lane = take(queues[name])
            if name == "waiting" and not queues["waiting"]:
                start(partial(run_all_of, "computing"))
        lane.run(stopping)
        report(lane)
        return True

    def run_all_of(name: str) -> None:
        while run_one_of(name):
            pass

    def run_first() -> None:
        try:
            run_all_of("first")
        finally:
            first_has_ended.set()
        run_all_of("waiting")
        run_all_of("computing")

    def compute() -> None:
        run_all_of("computing")
        first_has_ended.wait()
        run_all_of("waiting")

    def wait() -> None:
        while first and not first_has_ended.is_set() and run_one_of("computing", deque.pop):
            pass
        first_has_ended.wait()
        run_all_of("waiting")
        run_all_of("computing")

    def start(target: Callable[[], None]) -> None:
        workers.append(threading.Thread(target=target))
        workers[-1].start()

    workers: list[threading.Thread] = []
    for target in (run_first, compute, *[wait] * (at_once - 2)):
        start(target)
    for worker in workers:  # the last of them begins while another runs
        worker.join()


def report(lane: Lane) -> None:
    if lane.status is None:
        return
    if lane.status:
        print(f"---- {lane.name}: its output ----\n{lane.text}\n---- end of the output of {lane.name} ----")
    verdict = "passed" if lane.status == 0 else "FAILED"
    print(f"{lane.name:<8} {verdict} after {lane.seconds:4.0f} s  {lane.ending()}", flush=True)


def env_of(lane: str, directory: str) -> dict[str, str]:
    """Tests of ranks assert that no socket directory is left, so they have a temporary directory of their own. Threads of lanes
    that compute sleep instead of spinning while they wait for one whose core another lane has."""
    if lane in COMPUTING:
        return {"OMP_WAIT_POLICY": "passive"}
    if lane != "ranks":
        return {}
    own = Path(directory) / "tmp"
    own.mkdir()
    return {"TMPDIR": str(own), "RAY_TMPDIR": os.environ.get("RAY_TMPDIR", "/tmp")}


def total(lanes: Sequence[Lane], seconds: float) -> str:
    """One line for all lanes in the form of pytest's last line."""
    counts: dict[str, int] = {}
    for lane in lanes:
        for number, kind in COUNT.findall(lane.ending()):
            counts[kind] = counts.get(kind, 0) + int(number)
    broken = [lane.name for lane in lanes if lane.status != 0]
    said = ", ".join(
        f"{counts[kind]} {kind}" for kind in ("failed", "error", "errors", "passed", "skipped") if kind in counts
    )
    return f"{said or 'no tests ran'} in {seconds:.0f}s" + (f"; failed lanes: {', '.join(broken)}" if broken else "")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests", description=(__doc__ or "").partition("\n")[0])
    names = (*FIRST, *COMPUTING, *WAITING)
    parser.add_argument("--lanes", nargs="+", choices=names, metavar="LANE", help=f"of {', '.join(names)}")
    options, extra = parser.parse_known_args(argv)
    wanted = options.lanes or by_default(names, extra)
    began, stopping = time.monotonic(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="llama-tests-") as directory:
        known = commands(extra)
        chosen = [name for name in names if name in wanted]
        lanes = {
            name: Lane(
                name,
                known[name],
                Path(directory) / name,
                env_of(name, directory),
                NICENESS if name in COMPUTING else 0,
            )
            for name in chosen
        }
        running = threading.Thread(target=run_all, args=(lanes, stopping))
        # A job that a shell runs in the background inherits an ignored SIGINT, and so would the lanes.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        running.start()
        try:
            while running.is_alive():
                running.join(0.5)
        except KeyboardInterrupt:
            for number in (signal.SIGINT, signal.SIGTERM):  # a second one would leave the lanes' servers running
                signal.signal(number, signal.SIG_IGN)
            print(f"the lanes end their servers, within {LET_END_S:.0f} s", file=sys.stderr)
            stopping.set()
            deadline = time.monotonic() + LET_END_S
            for lane in lanes.values():
                lane.interrupt()
            for lane in lanes.values():
                lane.end_by(deadline)
            running.join()
            sys.exit(130)
        print(total(list(lanes.values()), time.monotonic() - began))
        sys.exit(any(lane.status != 0 for lane in lanes.values()))


def run_all(lanes: dict[str, Lane], stopping: threading.Event) -> None:
    def chosen(names: Sequence[str]) -> list[Lane]:
        return [lanes[name] for name in names if name in lanes]

    run_lanes(chosen(FIRST), chosen(COMPUTING), chosen(WAITING), stopping, AT_ONCE)


if __name__ == "__main__":
    main(sys.argv[1:])
