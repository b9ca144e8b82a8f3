"""The questions of all drivers, with the loads of our benchmarks.

Peers report no times of steps, so the decode time is the time of all tokens less the time of the first one.
"""

import argparse
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.harness.common import Spread
from benchmarks.harness.options import add_output_option
from benchmarks.harness.workload import Request, mixed_batch, random_prompt


class Peer(Protocol):
    """A loaded model that generates exactly the requested number of tokens greedily."""

    def seconds(self, requests: Sequence[Request]) -> float:
        """Seconds until all requests have every token."""


def figures(peer: Peer, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one question, after an uncounted run."""
    if options.question == "decode":
        prompt = random_prompt(options.prompt or 128, options.vocab_size, seed=3)
        first, whole = [Request(prompt, 1)], [Request(prompt, options.output)]
        peer.seconds(whole)
        pairs = [(peer.seconds(first), peer.seconds(whole)) for _ in range(options.repeats)]
        return {"decode_tok_s": Spread.of((options.output - 1) / (long - short) for short, long in pairs)}
    if options.question == "prefill":
        length = options.prompt or 512
        request = [Request(random_prompt(length, options.vocab_size, seed=3), 1)]
        peer.seconds(request)
        return {"prefill_tok_s": Spread.of(length / peer.seconds(request) for _ in range(options.repeats))}
    batch = mixed_batch(options.requests, options.vocab_size)
    total = sum(request.num_output for request in batch)
    peer.seconds(batch)
    return {"output_tok_s": Spread.of(total / peer.seconds(batch) for _ in range(options.repeats))}


def arguments(description: str) -> argparse.ArgumentParser:
    """The options of every driver."""
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
