"""Run by lm_eval_client.py in this repository's environment: log-likelihoods by `Llama.generate` in process.

Reads a JSON list of pairs of context and continuation from standard input, and prints a list of `score` and `is_greedy`. As in
lm-eval, the context's tokens are the first ones of the joined text, and an empty context is BOS alone.
"""

import json
import sys

from llama_core import Llama
from tests.support.programs import REPOSITORY


def main() -> None:
    llama = Llama.build(str(REPOSITORY / "demo"), max_seq_len=512, max_batch_size=4, dtype="float32", device="cpu")
    tokenizer = llama.tokenizer
    values = []
    for context, continuation in json.load(sys.stdin):
        whole = tokenizer.encode(context + continuation, bos=False, eos=False)
        first = len(tokenizer.encode(context, bos=False, eos=False))
        if not context:
            whole, first = tokenizer.encode(continuation, bos=True, eos=False), 1
        _, logprobs = llama.generate([whole], max_gen_len=1, temperature=0.0, logprobs=True, echo=True)
        assert logprobs is not None
        greedy = True
        for position in range(first, len(whole)):
            (likeliest,), _ = llama.generate([whole[:position]], max_gen_len=1, temperature=0.0)
            greedy = greedy and likeliest == [whole[position]]
            if not greedy:
                break
        values.append({"score": sum(logprobs[0][first : len(whole)]), "is_greedy": greedy})
    print(json.dumps(values))


if __name__ == "__main__":
    main()
