"""On a CUDA device, with llama_core alone: batch-1 decode against the device's read bandwidth, and a large offline batch.

    python -m benchmarks gpu                                   Llama-2-7B's shape, random weights in bfloat16
    python -m benchmarks gpu --shape tiny --requests 8 --shortest 8 --longest 32

Needs the libraries of llama_core, but no tokenizer, checkpoint or Ray. Random weights are written to a temporary directory
first (13.5 GB for 7B), because a runner loads a checkpoint; --ckpt takes an existing one. If transformers is installed, its
continuous batching gets the offline batch in the same run.
"""

import argparse
import gc
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.harness.bandwidth import BandwidthProbe
from benchmarks.harness.common import Spread, emit, print_table, versions
from benchmarks.harness.in_process import bytes_per_token, llama_of, run
from benchmarks.harness.make_checkpoint import SHAPES, random_weights, write_meta
from benchmarks.harness.options import question_parser
from benchmarks.harness.workload import Request, long_batch, random_prompt
from benchmarks.peers.hf_continuous import ContinuousBatching
from llama_core import Llama
from llama_core.checkpoint.meta_params import config_from_params
from llama_core.config import Device, DType, EngineConfig
from llama_core.execution import parallel as groups
from llama_core.model_config import ModelConfig

PROBE_BYTES = 4 * 2**30


def read_bandwidth(device: torch.device, num_bytes: int, passes: int = 20) -> Spread:
    """GB/s of the fastest of torch's own reductions over a buffer that no cache holds."""
    words = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    kernels: tuple[Callable[[], torch.Tensor], ...] = (words.sum, words.amax, words.view(-1, 4096).sum)
    return max((_reading(kernel, num_bytes, passes) for kernel in kernels), key=lambda spread: spread.median)


def _reading(kernel: Callable[[], torch.Tensor], num_bytes: int, passes: int) -> Spread:
    rates = []
    for _ in range(passes + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        kernel()
        end.record()
        end.synchronize()
        rates.append(num_bytes / begin.elapsed_time(end) / 1e6)
    return Spread.of(rates[3:])


def load(options: argparse.Namespace, ckpt: Path, max_seq_len: int, max_batch_size: int) -> Llama:
    """Load the model on the device, with as much cache as fits into its memory."""
    return llama_of(
        EngineConfig(
            ckpt_dir=str(ckpt),
            vocab_size=options.vocab_size,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
            max_step_tokens=max(options.max_step_tokens, max_batch_size),
            device=cast(Device, options.device),
            dtype=cast(DType, options.dtype),
            verify_checksums=False,
            speculation=False,
            prefix_caching=False,
        )
    )


def decode(options: argparse.Namespace, ckpt: Path, probe: Callable[[], Spread]) -> dict[str, Any]:
    """Batch 1: 128 tokens after a prompt of 128, and the bandwidth before and after."""
    llama = load(options, ckpt, options.prompt + options.output, 1)
    request = Request(random_prompt(options.prompt, options.vocab_size, seed=3), options.output)
    run(llama, [request])  # captures graphs, builds kernels
    before = probe()
    runs = [run(llama, [request]) for _ in range(options.repeats)]
    after = probe()
    read = bytes_per_token(llama, options.prompt + options.output / 2)
    rates = [one.decode_tok_s() for one in runs]
    bandwidth = (before.median + after.median) / 2
    return {
        "decode_tok_s": Spread.of(rates),
        "step_ms": Spread.of(step.ms for one in runs for step in one.decode_steps),
        "bytes_per_token": read,
        "device_gb_s_before": before,
        "device_gb_s_after": after,
        "share_of_bandwidth": Spread.of(rate * read / 1e9 / bandwidth for rate in rates),
    }


def offline(options: argparse.Namespace, ckpt: Path, requests: list[Request]) -> dict[str, Any]:
    """The offline batch."""
    longest = max(len(request.prompt) + request.num_output for request in requests)
    llama = load(options, ckpt, longest, min(options.max_batch_size, len(requests)))
    run(llama, _warm_up(requests))  # captures graphs, builds kernels
    runs = [run(llama, requests) for _ in range(options.batch_repeats)]
    return {
        "output_tok_s": Spread.of(one.num_output / one.seconds for one in runs),
        "seconds": Spread.of(one.seconds for one in runs),
        "steps": len(runs[-1].steps),
    }


def peer(options: argparse.Namespace, config: ModelConfig, requests: list[Request]) -> dict[str, Any]:
    """The offline batch on transformers, or the reason why it cannot run."""
    longest = max(len(request.prompt) + request.num_output for request in requests)
    device = groups.resolve_device(options.device)
    try:
        model = ContinuousBatching(config, longest, getattr(torch, options.dtype), device)
        model.seconds(_warm_up(requests))
        seconds = [model.seconds(requests) for _ in range(options.batch_repeats)]
    except (ImportError, RuntimeError, ValueError) as error:
        return {"unavailable": f"{type(error).__name__}: {error}"[:300]}
    total = sum(request.num_output for request in requests)
    return {
        "output_tok_s": Spread.of(total / each for each in seconds),
        "seconds": Spread.of(seconds),
        "versions": versions(["transformers"]),
    }


def main(argv: Sequence[str]) -> None:
    parser = question_parser("gpu", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--ckpt", type=Path, help="an existing checkpoint of that shape in Meta's format")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only shows that the benchmark runs"
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens of batch 1")
    parser.add_argument("--output", type=int, default=128, help="tokens of batch 1")
    parser.add_argument("--repeats", type=int, default=5, help="of batch 1")
    parser.add_argument("--requests", type=int, default=256, help="of the batch")
    parser.add_argument("--shortest", type=int, default=100, help="prompt and output of a request of the batch, tokens")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument("--max-step-tokens", type=int, default=2048)
    parser.add_argument("--batch-repeats", type=int, default=1)
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "torch sees no CUDA device\n")
    shape = SHAPES[options.shape]
    config = config_from_params(shape.params, vocab_size=options.vocab_size, source=options.shape)
    requests = long_batch(options.requests, options.shortest, options.longest, options.vocab_size)
    with tempfile.TemporaryDirectory(prefix="llama-bench-") as directory:
        ckpt = options.ckpt or Path(directory)
        if options.ckpt is None:
            write_meta(ckpt, shape, random_weights(config, getattr(torch, options.dtype), seed=0), tokenizer=None)
        alone = decode(options, ckpt, lambda: _probe(options.device))
        _forget()
        batch = offline(options, ckpt, requests)
    _forget()
    theirs = peer(options, config, requests)
    ratio = batch["output_tok_s"].median / theirs["output_tok_s"].median if "output_tok_s" in theirs else None
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print_table(
        f"{name}, {options.shape} {options.dtype}, batch 1",
        ["decode tok/s", "step ms", "MB/token", "GB/s before", "after", "share"],
        [
            (
                alone["decode_tok_s"],
                alone["step_ms"],
                alone["bytes_per_token"] / 1e6,
                alone["device_gb_s_before"],
                alone["device_gb_s_after"],
                alone["share_of_bandwidth"],
            )
        ],
    )
    print_table(
        f"Offline batch of {options.requests}, {options.shortest}-{options.longest} tokens in and out",
        ["engine", "useful output tok/s", "seconds", "ours / it"],
        [
            ("ours", batch["output_tok_s"], batch["seconds"], None),
            ("transformers", theirs.get("output_tok_s"), theirs.get("seconds"), ratio or theirs["unavailable"]),
        ],
    )
    emit(
        "gpu",
        {
            "device": name,
            "cuda": torch.version.cuda,
            "shape": options.shape,
            "dtype": options.dtype,
            "decode": alone,
            "offline": batch,
            "transformers": theirs,
            "ratio": ratio,
        },
        options,
    )


def _warm_up(requests: list[Request]) -> list[Request]:
    return [Request(request.prompt, min(4, request.num_output)) for request in requests[:8]]


def _probe(device: str) -> Spread:
    if device == "cpu":
        with BandwidthProbe() as probe:
            return probe.measure(passes=5).gb_s
    return read_bandwidth(torch.device("cuda"), min(PROBE_BYTES, int(torch.cuda.mem_get_info()[0] * 0.8)))


def _forget() -> None:
    """Free the memory for the next contender."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
