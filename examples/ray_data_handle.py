"""Ray Data asks a running server for each row of a Parquet file, by the Serve handle. Needs `pip install 'ray[data]'`.

    llama-ray up serve_config.yaml cpus_per_rank=0.4   # Ray Data's tasks need a CPU, and by default the ranks take them all
    python examples/ray_data_handle.py
    RAY_AUTH_MODE=token python examples/ray_data_handle.py --address HOST:PORT   # where several clusters run

Reads the column `question`, and writes a folder of Parquet files with the column `answer` beside it.
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray import serve

from llama_core.scheduling.sampling_params import SamplingParams

LOWEST_PRIORITY = 100  # only while the server has nothing else to do


def answer(batch: dict[str, Any], app: str) -> dict[str, Any]:
    """One call for all rows of a batch."""
    dialogs = [[{"role": "user", "content": str(question)}] for question in batch["question"]]
    params = SamplingParams(temperature=0.0, max_tokens=32)
    answers = serve.get_app_handle(app).sample.remote(dialogs, params, owner="ray-data", priority=LOWEST_PRIORITY)
    return {**batch, "answer": [each.text for each in answers.result()]}


def questions(path: Path) -> Path:
    """Write a file of 100 questions that the demo model can answer."""
    sums = [f"What is {a} + {b}?" for a in range(10) for b in range(10)]
    pq.write_table(pa.table({"question": sums}), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a Parquet file by the model's Ray Serve handle.")
    parser.add_argument("--input", type=Path, help="Parquet, on every node; questions of its own if absent")
    parser.add_argument("--output", type=Path, help="a folder; a temporary one if absent")
    parser.add_argument("--address", default="auto", help="of the running cluster, as for ray.init")
    parser.add_argument("--app", default="llama", help="the application's name in serve_config.yaml")
    args = parser.parse_args()
    output = args.output or Path(tempfile.mkdtemp(prefix="answers-"))
    ray.init(address=args.address, log_to_driver=False, logging_level=logging.ERROR)
    if ray.available_resources().get("CPU", 0) < 1:  # type: ignore[no-untyped-call]
        sys.exit(
            "The ranks hold every CPU, and Ray Data would wait for one: start the server with a smaller cpus_per_rank."
        )
    rows = ray.data.read_parquet(str(args.input or questions(output.with_suffix(".parquet"))))
    # Two calls at once, so that the server has work while a batch is read or written. A block has one call at a time.
    answered = rows.repartition(target_num_rows_per_block=32).map_batches(
        answer, fn_kwargs={"app": args.app}, batch_size=16, compute=ray.data.TaskPoolStrategy(size=2), num_cpus=0
    )
    answered.write_parquet(str(output))
    table = pq.read_table(output)
    for row in table.slice(0, 3).to_pylist():
        print(f"{row['question']} ... {row['answer']}")
    print(f"{table.num_rows} rows in {output}")
    ray.shutdown()


if __name__ == "__main__":
    main()
