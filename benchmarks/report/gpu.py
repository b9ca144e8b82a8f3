"""The table of GPUs that were measured: a row for each run of `python -m benchmarks gpu`."""

from collections.abc import Sequence
from typing import Any

from benchmarks.report.markdown import table

COLUMNS = {
    "batch_1_tok_s": "batch 1 tok/s",
    "batch_1_share": "of bandwidth",
    "batch_64_of_floor": "batch 64, times its bytes",
    "prompt_share": "prompt, of products",
    "offline_tok_s": "offline tok/s",
    "offline_ratio": "of transformers",
    "kill_to_token_s": "kill to token, s",
    "taken_of_plan": "memory, of plan",
}


def gpu(results: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            f"{result['device']}, {result['settings']['shape']} {result['settings']['dtype']}",
            *(result["summary"][name] for name in COLUMNS),
        )
        for result in results
    ]
    return table(["device, model", *COLUMNS.values()], rows)
