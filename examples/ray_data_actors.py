"""Ray Data with the model itself in actors, without a server, for each row of a Parquet file. Needs `pip install 'ray[data]'`.

    python examples/ray_data_actors.py
    python examples/ray_data_actors.py --input questions.parquet --output answers --ckpt-dir /models/my-model --actors 4

Reads the column `question`, and writes a folder of Parquet files with the column `answer` beside it.
"""

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray

from llama_core import Llama

DEMO = Path(__file__).resolve().parent.parent / "demo"


class Answerer:
    """One actor: a model of its own, which a whole batch shares."""

    def __init__(self, ckpt_dir: str, batch_size: int) -> None:
        self._llama = Llama.build(ckpt_dir, max_seq_len=256, max_batch_size=batch_size)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        dialogs: Any = [[{"role": "user", "content": str(question)}] for question in batch["question"]]
        answers = self._llama.chat_completion(dialogs, temperature=0.0, max_gen_len=32)
        return {**batch, "answer": [answer["generation"]["content"] for answer in answers]}


def questions(path: Path) -> Path:
    """Write a file of 100 questions that the demo model can answer."""
    capitals = ["France", "Italy", "Spain", "Germany", "Japan"]
    asked = [f"What is the capital of {capitals[number % len(capitals)]}?" for number in range(100)]
    pq.write_table(pa.table({"question": asked}), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a Parquet file by models in actors.")
    parser.add_argument("--input", type=Path, help="Parquet; questions of its own if absent")
    parser.add_argument("--output", type=Path, help="a folder; a temporary one if absent")
    parser.add_argument("--ckpt-dir", type=Path, default=DEMO)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--cpus", type=int, default=1, help="of one actor; Ray Data's own tasks need another CPU")
    args = parser.parse_args()
    output = args.output or Path(tempfile.mkdtemp(prefix="answers-"))
    ray.init(logging_level=logging.ERROR)
    rows = ray.data.read_parquet(str(args.input or questions(output.with_suffix(".parquet"))))
    answered = rows.map_batches(
        Answerer,
        fn_constructor_kwargs={"ckpt_dir": str(args.ckpt_dir), "batch_size": 32},
        batch_size=32,
        compute=ray.data.ActorPoolStrategy(size=args.actors),
        num_cpus=args.cpus,
    )
    answered.write_parquet(str(output))
    table = pq.read_table(output)
    for row in table.slice(0, 3).to_pylist():
        print(f"{row['question']} ... {row['answer']}")
    print(f"{table.num_rows} rows in {output}")


if __name__ == "__main__":
    main()
