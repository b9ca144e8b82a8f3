"""Our predictions for `agreement`, on each rank of a torchrun: python -m benchmarks.harness.answers GIVEN.json FOUND.json"""

import json
import os
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

from llama_core import Llama

_END = -1  # we end a text where transformers goes on


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


def main(given: Path, found: Path) -> None:
    asked: dict[str, Any] = json.loads(given.read_text())
    longest = max(len(each["prompt"]) + len(each["output"]) for each in asked["answers"])
    ckpt = asked["ckpt"]
    llama = Llama.build(ckpt, ckpt, longest + 2, 16, device="cpu", backend="native", **asked["settings"])
    ends = llama.tokenizer.stop_ids
    answers = [answer(llama, each["prompt"], each["output"], ends) for each in asked["answers"]]
    if os.environ.get("RANK", "0") == "0":
        found.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
