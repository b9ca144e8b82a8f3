"""Generates inputs for the server, the scheduler, a rank group, and the files, and reports every violated rule.

python -m tests.fuzz --parts http scheduler group files chats --json report.json
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz import chats, files, group, http, scheduler
from tests.fuzz.outcome import Outcome

FILES = {  # part -> kind of file
    "safetensors": "safetensors", "configs": "config", "gguf": "gguf",
    "tokenizers": "tokenizer_json", "gguf_vocabularies": "gguf_vocabulary",
}  # fmt: skip
PARTS: dict[str, tuple[Callable[[int, int], Outcome], int]] = {
    # part -> (the function that runs it, default number of cases)
    "http": (http.run, 100_000),
    "scheduler": (scheduler.run, 1_000_000),
    "group": (group.run, 300_000),
    "files": (files.run, 5_000),
    **{part: (partial(files.run, shares={kind: 1}, part=part), 5_000) for part, kind in FILES.items()},
    "chats": (chats.run, 10_000),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--cases", type=int, help=f"of each part; else {', '.join(f'{n} {p}' for p, (_, n) in PARTS.items())}"
    )
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same cases")
    parser.add_argument("--json", type=Path, help="file of the report; its entries of parts that did not run stay")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)  # the inputs cause thousands of log lines
    ran: dict[str, dict[str, Any]] = {}
    for part in options.parts:
        run, cases = PARTS[part]
        outcome = run(cases if options.cases is None else options.cases, options.seed)
        ran[part] = {"seed": options.seed} | outcome.report()
        print(f"{part}: {json.dumps(ran[part], indent=2)}", flush=True)
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps(before | ran, indent=2) + "\n")
    if any(part["findings"] for part in ran.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
