"""lm-eval with the server's own tokenizer: log-likelihoods, rolling and of choices, equal those in process; generation.

The runner's Python computes the values in process by log_likelihoods.py.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

from lm_eval import simple_evaluate

from tests.programs.clients.checks import BASE_URL, MODEL, check, run_checks

TOLERANCE: Final = 1e-4
DIRECTORY = tempfile.TemporaryDirectory()
ROWS: Final[list[dict[str, Any]]] = [
    {
        "question": f"Question: What is {a} + {b}?\nAnswer:",
        "choices": [f" {a} + {b} = {a + b}", f" {a} + {b} = {a + b + 1}", " I do not know"],
        "text": f"Question: What is {a} + {b}?\nAnswer: {a} + {b} = {a + b}.\nQuestion: Who are you?\nAnswer: A small model.",
    }
    for a, b in [(7, 5), (2, 3), (8, 1), (4, 4), (6, 9)]
]


def evaluate(name: str, **config: Any) -> list[dict[str, Any]]:
    """The samples of one task over ROWS, which has no file of its own in the package."""
    data = Path(DIRECTORY.name) / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = {"data_files": {"test": str(data)}}
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **config}
    found: Any = simple_evaluate(
        model="local-completions",
        model_args=f"model={MODEL},base_url={BASE_URL}/completions,tokenizer_backend=remote,num_concurrent=2,max_length=512",
        tasks=[task],
        log_samples=True,
        bootstrap_iters=0,
    )
    samples: list[dict[str, Any]] = found["samples"][name]
    assert len(samples) == len(ROWS)
    return samples


def in_process(pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """For each pair of context and continuation the log-likelihood and whether greedy decoding would write it."""
    done = subprocess.run(
        [os.environ["CLIENT_SERVER_PYTHON"], "-m", "tests.programs.clients.log_likelihoods"],
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    values: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return values


@check
def log_likelihoods_of_choices_equal_those_in_process() -> None:
    samples = evaluate(
        "choices",
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{choices}}",
        doc_to_target=0,
        target_delimiter="",
    )
    pairs = [(row["question"], choice) for row in ROWS for choice in row["choices"]]
    found = [answer for sample in samples for (answer,) in sample["resps"]]
    expected = in_process(pairs)
    difference = max(abs(float(value) - e["score"]) for (value, _), e in zip(found, expected, strict=True))
    print(f"largest difference of a log-likelihood of a choice: {difference:.1e}")
    assert difference <= TOLERANCE
    assert [str(greedy) for _, greedy in found] == [str(e["is_greedy"]) for e in expected]
    assert len({round(e["score"], 2) for e in expected}) > len(ROWS)


@check
def rolling_log_likelihoods_equal_those_in_process() -> None:
    samples = evaluate(
        "rolling",
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}],
    )
    found = [float(sample["resps"][0][0]) for sample in samples]
    expected = [value["score"] for value in in_process([("", row["text"]) for row in ROWS])]
    difference = max(abs(value - e) for value, e in zip(found, expected, strict=True))
    print(f"largest difference of a rolling log-likelihood: {difference:.1e}")
    assert difference <= TOLERANCE, (found, expected)


@check
def generation_answers_and_stops() -> None:
    samples = evaluate(
        "generation",
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{choices[0]}}",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 24, "temperature": 0, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    )
    texts = [sample["resps"][0][0] for sample in samples]
    assert all(text.strip() and "\n" not in text for text in texts), texts
    assert len(set(texts)) > 1, texts


if __name__ == "__main__":
    run_checks()
