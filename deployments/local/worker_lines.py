"""Selects the lines for the terminal from all lines that Ray forwards from its workers to the driver."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from deployments.local.console import Console

_HANDLER: Final = "llama-ray"
# Serve's lines: "WARNING 2026-01-31 12:00:00,123 llama_LlamaIngress 9e81ba8b -- text", with a request id before "--" or not.
_SERVE_LINE: Final = re.compile(r"(?P<level>[A-Z]+) \S+ (?P<time>\d\d:\d\d:\d\d),\d+ (?:\S+ ){2,3}-- (?P<text>.*)")
# A rank's lines: "2026-01-31 12:00:00,123 WARNING rank=1 epoch=0 module text".
_RANK_LINE: Final = re.compile(
    r"\S+ (?P<time>\d\d:\d\d:\d\d),\d+ (?P<level>[A-Z]+) rank=(?P<rank>\S+) epoch=\S+ \S+ (?P<text>.*)"
)
_MATTERS: Final = ("WARNING", "ERROR", "CRITICAL")
# The request log's lines, and Serve's about a port that it tries again: neither needs an action.
_ROUTINE: Final = re.compile(r"^request \{|Retrying\.\.\.$")
_RECOVERY: Final = re.compile(r"\brecover(ed|ing)\b")
# Of Serve's controller only lines about failed replicas: "Actor for Replica(...) crashed", "failed the health check".
_REPLICA: Final = re.compile(r"crashed|health check")
_LONGEST: Final = 400


def follow(console: Console) -> None:
    """Show the selected lines on the console from now on. Call it once, after `ray.init`."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher

    def on_lines(batch: Mapping[str, Any]) -> None:
        name = str(batch.get("actor_name") or "")
        for line in batch.get("lines", ()):
            if name.startswith("RankWorker"):
                console.phase("ranks started, loading weights")
            if (shown := line_to_show(name, line)) is not None:
                console.event(shown)

    global_worker_stdstream_dispatcher.add_handler(_HANDLER, on_lines)


def line_to_show(actor_name: str, line: str) -> str | None:
    """The line as the terminal shows it, or None for a line that only the log file needs."""
    fields = _fields_of(line)
    if fields is None:
        return None
    level, text = fields["level"], fields["text"]
    if actor_name.startswith("ServeReplica"):
        source = "replica"
        is_shown = level == "ERROR" or (
            bool(_RECOVERY.search(text)) or (level in _MATTERS and not _ROUTINE.search(text))
        )
    elif actor_name.startswith("RankWorker"):
        source, is_shown = f"rank {fields.get('rank', '')}".strip(), level in _MATTERS
    elif actor_name.startswith("ServeController"):
        source, is_shown = "Serve", level in _MATTERS and bool(_REPLICA.search(text))
    else:
        return None
    return f"  {fields['time']} {level} {source}: {text[:_LONGEST]}" if is_shown else None


def _fields_of(line: str) -> Mapping[str, str] | None:
    """The level, time and text of a log line, and the rank of a rank's; None for a line of another kind."""
    if not line.startswith("{"):
        match = _SERVE_LINE.match(line) or _RANK_LINE.match(line)
        return None if match is None else match.groupdict()
    try:
        found = json.loads(line)
        fields = {"level": found["level"], "time": found["time"][11:19], "text": found["message"]}
    except (ValueError, KeyError, TypeError):
        return None
    if fields["text"] == "request":
        fields["text"] = f"request {line}"
    return {name: str(value) for name, value in (fields | {"rank": found.get("rank", "")}).items()}
