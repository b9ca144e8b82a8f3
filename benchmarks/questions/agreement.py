"""Whether a GGUF model answers as transformers does: greedy tokens of both, in float32 and as the file stores its weights.

python -m benchmarks agreement --ckpt models/SmolLM2-135M-Instruct.Q4_1.gguf
python -m benchmarks agreement --ckpt FILE --ranks 1 --questions 5     a short form

transformers loads the same file in float32 and answers every question. Then our ranks predict each of its tokens from the ones
before (teacher-forced), and answer by themselves (free-running). Tokens count where transformers' two best logits differ by
more than --gap: below, the order of additions decides. Exits with 1 if a float32 run disagrees.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.common import REPOSITORY, emit, print_table
from benchmarks.harness.options import question_parser
from llama_core import Llama

QUESTIONS = REPOSITORY / "benchmarks" / "data" / "questions.txt"
_END = -1  # we end a text where transformers goes on


@dataclass(frozen=True, slots=True)
class Answer:
    """What transformers says to one prompt. gaps: between the two best logits, for each token of `output`."""

    prompt: list[int]
    output: list[int]
    gaps: list[float]


@dataclass(frozen=True, slots=True)
class Agreement:
    """(clear tokens that agree, all clear tokens) of all answers together. free: up to the first unclear token of an answer."""

    forced: tuple[int, int]
    free: tuple[int, int]

    @property
    def is_complete(self) -> bool:
        return self.forced[0] == self.forced[1] and self.free[0] == self.free[1]


def compare(answers: Sequence[Answer], ours: Sequence[dict[str, list[int]]], gap: float) -> Agreement:
    """ours: for each answer "forced", our prediction of each of its tokens, and "free", our own answer."""
    forced, free = [], []
    for answer, own in zip(answers, ours, strict=True):
        clear = [each > gap for each in answer.gaps]
        forced += [a == b for a, b, counts in zip(answer.output, own["forced"], clear, strict=True) if counts]
        end = clear.index(False) if False in clear else len(clear)
        padded = [*own["free"][:end], *[-1] * (end - len(own["free"]))]
        free += [a == b for a, b in zip(answer.output[:end], padded, strict=True)]
    return Agreement((sum(forced), len(forced)), (sum(free), len(free)))


def answers_of_transformers(path: Path, questions: Sequence[str], num_tokens: int) -> list[Answer]:
    """Greedy answers in float32, the token that ends them included."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    answers = []
    for question in questions:
        dialog = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(dialog, add_generation_prompt=True, return_dict=True)["input_ids"]
        with torch.inference_mode():
            made = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                max_new_tokens=num_tokens, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        best = torch.stack(made.logits)[:, 0].topk(2).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        answers.append(Answer(list(prompt), made.sequences[0, len(prompt) :].tolist(), gaps))
    return answers


def our_answers(options: argparse.Namespace, answers: Sequence[Answer], ranks: int, **settings: str) -> Any:
    """What `ranks` processes of this machine say, each of which runs this module."""
    with tempfile.TemporaryDirectory() as name:
        given, found = Path(name) / "given.json", Path(name) / "found.json"
        asked = [{"prompt": answer.prompt, "output": answer.output} for answer in answers]
        given.write_text(json.dumps({"ckpt": str(options.ckpt), "settings": settings, "answers": asked}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        subprocess.run([*command, "-m", __name__, str(given), str(found)], cwd=REPOSITORY, check=True)
        return json.loads(found.read_text())


def answer(llama: Llama, prompt: list[int], output: list[int], ends: Set[int]) -> dict[str, list[int]]:
    """Our prediction of each token of `output` from the tokens before it, and our own answer of that length.

    ends: the ids that end a text. `generate` leaves them out; where it ends, any of them is what we predict.
    """
    prefixes = [[*prompt, *output[:length]] for length in range(len(output))]
    forced, _ = llama.generate(prefixes, 1, temperature=0)
    free, _ = llama.generate([prompt], len(output), temperature=0)
    ended = [token if token in ends else _END for token in output]
    own = [*free[0], *ended[len(free[0]) :][:1]]
    return {"forced": [tokens[0] if tokens else end for tokens, end in zip(forced, ended, strict=True)], "free": own}


def answer_on_rank(given: Path, found: Path) -> None:
    asked: dict[str, Any] = json.loads(given.read_text())
    longest = max(len(each["prompt"]) + len(each["output"]) for each in asked["answers"])
    ckpt = asked["ckpt"]
    llama = Llama.build(ckpt, ckpt, longest + 2, 16, device="cpu", backend="native", **asked["settings"])
    ends = llama.tokenizer.stop_ids
    answers = [answer(llama, each["prompt"], each["output"], ends) for each in asked["answers"]]
    if os.environ.get("RANK", "0") == "0":
        found.write_text(json.dumps(answers))


def main(argv: Sequence[str]) -> None:
    parser = question_parser("agreement", __doc__)
    parser.add_argument("--ckpt", type=Path, required=True, help="a .gguf file")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--questions", type=int, help="only the first ones")
    parser.add_argument("--tokens", type=int, default=40, help="of an answer at most")
    parser.add_argument("--gap", type=float, default=0.01, help="between two logits that are clearly different")
    options = parser.parse_args(argv)
    options.ckpt = options.ckpt.resolve()
    questions = QUESTIONS.read_text().splitlines()[: options.questions]
    answers = answers_of_transformers(options.ckpt, questions, options.tokens)
    rows, cases, failed = [], {}, False
    for dtype, quantization in (("float32", "none"), ("bfloat16", "auto")):
        for ranks in options.ranks:
            ours = our_answers(options, answers, ranks, dtype=dtype, quantization=quantization)
            found = compare(answers, ours, options.gap)
            failed |= dtype == "float32" and not found.is_complete
            name = f"{dtype}, {'as stored' if quantization == 'auto' else 'expanded'}"
            rows.append((name, ranks, "{} of {}".format(*found.forced), "{} of {}".format(*found.free)))
            cases[f"{name}, {ranks} ranks"] = {"forced": found.forced, "free": found.free}
    print_table(
        f"{options.ckpt.name}, {len(questions)} questions, gap {options.gap:g}: tokens equal to transformers'",
        ["weights", "ranks", "teacher-forced", "free-running"],
        rows,
    )
    emit("agreement", {"model": options.ckpt.name, "questions": len(questions), "cases": cases}, options)
    if failed:
        sys.exit("a float32 run does not agree with transformers")


if __name__ == "__main__":  # on each rank of a torchrun
    answer_on_rank(Path(sys.argv[1]), Path(sys.argv[2]))
