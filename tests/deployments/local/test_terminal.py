"""What `llama-ray up` shows on the terminal: the banner, its own lines, those of workers, and what the log file has."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployments.local.banner import banner, base_url
from deployments.local.console import Console
from deployments.local.worker_lines import line_to_show
from llama_core.model.share import RankShare
from tests.support.plain_model import decoder
from tests.support.programs import REPOSITORY, environment

SMOLLM2 = decoder(576, 30, 9, 3, 64, 1536, 49_152)


def props(num_ranks: int = 2, **changes: Any) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank,
            "device": "cpu (1 thread), native avx2",
            "dtype": "bfloat16 with int4_min weights",
            "weight_bytes": 61_000_000,
            "share": RankShare.of(SMOLLM2, rank, num_ranks).describe(SMOLLM2),
        }
        for rank in range(num_ranks)
    ]
    return {
        "model": "smollm2",
        "world_size": num_ranks,
        "ranks": ranks,
        "max_seq_len": 8192,
        "max_seq_len_reason": "the model's context",
        "checkpoint_format": "gguf",
        "chat_format": "template",
        "stop_tokens": ("<|endoftext|>", "<|im_end|>"),
    } | changes


def test_the_banner_says_what_is_served_and_what_share_each_rank_has() -> None:
    lines = banner(props(), "127.0.0.1", 8000).splitlines()
    assert "    model    smollm2 (GGUF; bfloat16 with int4_min weights)" in lines
    assert "    context  max_seq_len 8,192, the model's context" in lines
    assert "    format   template; an answer ends at <|endoftext|>, <|im_end|>" in lines
    assert "    ranks    2: each on cpu (1 thread), native avx2" in lines
    share = "3 of 9 heads, 1 of 3 kv heads, 768 of 1,536 hidden units, 24,576 of 49,152 vocabulary rows; 61 MB"
    assert f"             rank 0: {share}" in lines, "the share that RankShare computes"
    assert "rank 1: 6 of 9 heads, 2 of 3 kv heads" in "\n".join(lines)


def test_only_the_demos_banner_names_the_command_for_a_real_model() -> None:
    assert "make serve MODEL=smollm2" in banner(props(model="llama-demo"), "127.0.0.1", 8000)
    assert "make serve" not in banner(props(), "127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "127.0.0.1"),
        ("::0", "127.0.0.1"),
        ("::1", "[::1]"),
        ("llama.example", "llama.example"),
    ],
)
def test_the_address_is_one_that_a_client_on_this_machine_can_use(host: str, name: str) -> None:
    assert base_url(host, 8000) == f"http://{name}:8000"


# The terminal and the log file of `llama-ray up`.


PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from deployments.local.console import Console
log = Path(sys.argv[1]) if len(sys.argv) > 1 else None
console = Console(log)
console.phase("Ray started")
console.phase("Ray started")
print("a line of Serve")
os.system("echo a line of HAProxy >&2")
console.show("the banner")
console.event("Draining")
assert log is None or console.end_of_log(1) == "Draining"
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )


def test_the_terminal_shows_the_consoles_lines_and_the_log_file_shows_all(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    done = run(str(log))
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0].endswith("s  Ray started") and lines[1] == "the banner"
    assert done.stderr.splitlines() == ["Draining"]
    logged = log.read_text()
    for line in ("Ray started", "a line of Serve", "a line of HAProxy", "the banner", "Draining"):
        assert logged.count(line) == 1
    assert log.stat().st_mode & 0o077 == 0, "other users cannot read it"


def test_a_full_disk_leaves_the_terminal_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    console = Console(None)
    console.log = Path("up.log")
    monkeypatch.setattr(console, "_out", shown)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        console.show("the banner")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert shown.getvalue() == "the banner\n"


# The workers' lines that the terminal shows.


TIME = "2026-01-31 12:00:07,123"
SERVE, CONTROLLER = f"{TIME} llama_LlamaIngress hh70cf0w -- ", f"{TIME} controller 42 -- "
JSON = '{"time": "2026-01-31T12:00:07.123Z", "level": "WARNING", "message": "recovered", "rank": 1}'
OUTCOME = '{"time": "2026-01-31T12:00:07.123Z", "level": "WARNING", "message": "request", "outcome": "ok"}'
REPLICA = "ServeReplica:llama:LlamaIngress"


@pytest.mark.parametrize(
    ("actor", "line", "shown"),
    [
        (REPLICA, f"WARNING {SERVE}recovered", "WARNING replica: recovered"),
        (REPLICA, f'WARNING {SERVE}request {{"outcome": "ok"}}', None),
        (REPLICA, f"ERROR {SERVE}request {{}}", "ERROR replica: request {}"),
        (REPLICA, f"WARNING {SERVE.removesuffix('-- ')}5f3c9a -- a client left", "WARNING replica: a client left"),
        (REPLICA, JSON, "WARNING replica: recovered"),
        (REPLICA, OUTCOME, None),
        (REPLICA, f"INFO {SERVE}ready after 2.3 s", None),
        (REPLICA, "Traceback (most recent call last):", None),
        ("RankWorker", JSON, "WARNING rank 1: recovered"),
        ("RankWorker", f"{TIME} INFO rank=0 epoch=0 cluster.rank.rank_process serving", None),
        ("RankWorker", f"{TIME} WARNING rank=0 epoch=0 llama_core.x torch", "WARNING rank 0: torch"),
        ("ServeController", f"WARNING {CONTROLLER}HTTPOptions.host='127.0.0.1' won't accept connections", None),
        (
            "ServeController",
            f"WARNING {CONTROLLER}Actor for Replica crashed.",
            "WARNING Serve: Actor for Replica crashed.",
        ),
        ("HAProxyManager", f"ERROR {TIME} proxy 127.0.0.1 -- x", None),
    ],
)
def test_the_terminal_shows_failures_and_recoveries_only(actor: str, line: str, shown: str | None) -> None:
    assert line_to_show(actor, line) == (shown and f"  12:00:07 {shown}")
