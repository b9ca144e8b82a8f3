"""`llama-ray batch` with a server of its own, killed twice, and its engine killed twice: is each line answered once, and as in
an undisturbed run?

    python -m tests.programs.batch_kills --lines 10000

Kills come at random moments of the run. Prints what it saw as a line of JSON.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.programs import REPOSITORY, environment
from tests.support.server import TEST_MARK, marked_processes
from tests.support.waiting import wait_until

KILLS = ("engine", "command", "command", "engine")
ENGINE = "ray::ServeReplica:"  # its process has HTTP and the engine loop, and its ranks end with it
PATIENCE_S = 300.0  # for a start of the server


def lines(count: int) -> list[dict[str, Any]]:
    """Questions for the three routes. Their answers are sampled."""
    found = []
    for i in range(count):
        url, text = ("chat/completions", "completions", "responses")[i % 3], f"What is {i % 10} + {i // 10 % 10}?"
        body: dict[str, Any] = {"max_tokens": 8}
        if url == "completions":
            body["prompt"] = f"Once upon a time there were {i}"
        elif url == "responses":
            body = {"max_output_tokens": 8, "input": text}
        else:
            body["messages"] = [{"role": "user", "content": text}]
        found.append({"custom_id": f"line-{i}", "method": "POST", "url": f"/v1/{url}", "body": body})
    return found


def command(source: Path, target: Path, mark: str) -> "subprocess.Popen[str]":
    words = ["batch", str(source), "-o", str(target), "serve_config.yaml"]
    env = environment(**{TEST_MARK: mark, "RAY_ADDRESS": "local"})
    return subprocess.Popen(
        [sys.executable, "-m", "cli", *words], cwd=REPOSITORY, env=env, stderr=subprocess.PIPE, text=True
    )


def num_answered(target: Path) -> int:
    return target.read_bytes().count(b"\n") if target.exists() else 0


def finish(running: "subprocess.Popen[str]") -> str:
    """The last line that the command says; it must end well."""
    said = running.communicate()[1]
    assert running.returncode == 0, said[-3000:]
    return said.strip().splitlines()[-1]


def disturbed(source: Path, target: Path, count: int, mark: str, draw: random.Random) -> str:
    running = command(source, target, mark)
    for number, kind in enumerate(KILLS):
        enough = int(count * (number + draw.random()) / len(KILLS))
        wait_until("it answers", lambda enough=enough: num_answered(target) > enough, PATIENCE_S + count / 10)  # type: ignore[misc]
        time.sleep(draw.random() / 10)
        assert running.poll() is None, "it has ended before the kills"
        print(f"{num_answered(target)} answered, killing the {kind}", file=sys.stderr, flush=True)
        if kind == "command":
            running.kill()
            running.communicate()
            running = command(source, target, mark)
        else:
            engines = [pid for pid, words in marked_processes(mark).items() if words.startswith(ENGINE)]
            assert engines, "the engine was not found"
            for pid in engines:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return finish(running)


def said(line: dict[str, Any]) -> Any:
    """What the model has said, without ids and times."""
    body = line["response"]["body"]
    return body["choices"] if "choices" in body else [item["content"] for item in body["output"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    seen: dict[str, Any] = {"lines": options.lines, "kills": Counter(KILLS)}
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        source, plain, target = (Path(name) / each for each in ("input", "plain", "output"))
        source.write_text("".join(json.dumps(line) + "\n" for line in lines(options.lines)))
        began_s = time.monotonic()
        seen["undisturbed"] = finish(command(source, plain, mark))
        middle_s = time.monotonic()
        seen["disturbed"] = disturbed(source, target, options.lines, mark, random.Random(options.seed))
        seen["seconds"] = [round(middle_s - began_s, 1), round(time.monotonic() - middle_s, 1)]
        expected, found = ([json.loads(line) for line in file.open()] for file in (plain, target))
    times = Counter(line["custom_id"] for line in found)
    answers = {line["custom_id"]: said(line) for line in expected}
    seen["answered_once"] = sum(number == 1 for number in times.values())
    seen["differing"] = sum(answers.get(line["custom_id"]) != said(line) for line in found)
    wait_until("every process has ended", lambda: not marked_processes(mark))
    print("SEEN", json.dumps(seen))


if __name__ == "__main__":
    main()
