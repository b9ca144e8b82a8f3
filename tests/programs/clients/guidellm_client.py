"""guidellm over chat and over completions, streamed, with prompts of a file and no tokenizer."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.programs.clients.checks import QUESTION, URL, check, completed, run_checks

NUM_REQUESTS, NUM_TOKENS = 12, 12
COMMAND = Path(sys.executable).with_name("guidellm")


def benchmark(form: str) -> dict[str, Any]:
    """The report's one benchmark of `form`, a route of the server."""
    with tempfile.TemporaryDirectory() as directory:
        prompts, report = Path(directory) / "prompts.jsonl", Path(directory) / "report.json"
        # More rows than requests: guidellm waits for ever where the rows run out.
        row = {"prompt": QUESTION, "output_tokens_count": NUM_TOKENS}
        prompts.write_text(f"{json.dumps(row)}\n" * (4 * NUM_REQUESTS))
        command = [
            *(str(COMMAND), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={URL},request_format={form}"),
            *("--profile", "kind=concurrent,streams=3"),
            *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--data", f"kind=json_file,path={prompts}"),
            *("--output", f"kind=json,path={report}"),
        ]
        completed(*command, timeout_s=150, folder=directory)
        (found,) = json.loads(report.read_text())["benchmarks"]
    return dict(found)


def check_complete(form: str) -> None:
    found = benchmark(form)
    requests = found["requests"]
    assert not requests["errored"], requests["errored"][:1]
    assert len(requests["successful"]) == NUM_REQUESTS
    for request in requests["successful"]:
        assert request["output_tokens"] == NUM_TOKENS, request
        assert request["prompt_tokens"] > 0, request
        assert 0 < request["time_to_first_token_ms"] <= request["request_latency"] * 1000, request


@check
def chats_and_completions_have_every_token_and_times() -> None:
    check_complete("/v1/chat/completions")
    check_complete("/v1/completions")


if __name__ == "__main__":
    run_checks()
