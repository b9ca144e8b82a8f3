"""transformers' `generate` in process: the questions `decode`, `prefill` and `offline`.

    HF_ENVIRONMENT/bin/python -m benchmarks.peers.hf_driver --ckpt HF_DIRECTORY --dtype bfloat16 --question decode

Offline requests run in batches of `--batch`, padded to the longest prompt and run to the longest output, as its users do.
Only the requested tokens count.
"""

import argparse
import os
import time
from collections.abc import Sequence

import torch

from benchmarks.harness.common import emit, print_table, versions
from benchmarks.harness.workload import Request
from benchmarks.peers.questions import arguments, figures


class Transformers:
    """A loaded model that generates the requested number of tokens greedily."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import LlamaForCausalLM

        self._batch = options.batch
        self._model = LlamaForCausalLM.from_pretrained(options.ckpt, dtype=getattr(torch, options.dtype)).eval()
        self._model.generation_config.eos_token_id = None  # the number of tokens is given
        self._model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def seconds(self, requests: Sequence[Request]) -> float:
        """Seconds until all requests have every token."""
        begin = time.perf_counter()
        for start in range(0, len(requests), self._batch):
            self._generate(requests[start : start + self._batch])
        return time.perf_counter() - begin

    def _generate(self, requests: Sequence[Request]) -> None:
        """Generate for one batch, padded on the left."""
        width = max(len(request.prompt) for request in requests)
        count = max(request.num_output for request in requests)
        missing = [width - len(request.prompt) for request in requests]
        ids = torch.tensor([[0] * pad + request.prompt for pad, request in zip(missing, requests, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in missing])
        made = self._model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
        assert made.shape == (len(requests), width + count), "every request gets what it asked for"


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="requests of one padded batch")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = figures(Transformers(options), options)
    print_table(f"transformers, {options.question}", ["figure", "value"], found.items())
    emit("transformers", {"question": options.question, "peer_versions": versions(["transformers"]), **found}, options)


if __name__ == "__main__":
    main()
