"""llama.cpp's own `llama-bench`: the questions `decode` and `prefill`. Any Python runs this.

    python -m benchmarks.peers.llamacpp_driver --bench LLAMA_CPP/bin/llama-bench --gguf FILE --question decode

`decode` generates after a context as long as the prompt. `offline` and `online` use llama.cpp's server.
"""

import argparse
import json
import os
import subprocess

from benchmarks.harness.common import Spread, emit, print_table
from benchmarks.harness.options import add_output_option


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bench", required=True, help="the program llama-bench")
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--question", required=True, choices=("decode", "prefill"))
    parser.add_argument("--prompt", type=int, help="tokens; 128 for decode and 512 for prefill if absent")
    parser.add_argument("--output", type=int, default=128, help="tokens of decode")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add_output_option(parser)
    options = parser.parse_args()
    if options.question == "decode":
        figure, load = "decode_tok_s", ["-p", "0", "-n", str(options.output), "-d", str(options.prompt or 128)]
    else:
        figure, load = "prefill_tok_s", ["-p", str(options.prompt or 512), "-n", "0"]
    command = [options.bench, "-m", options.gguf, "-t", str(options.threads), "-r", str(options.repeats), "-o", "json"]
    done = subprocess.run([*command, *load], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    (result,) = json.loads(done.stdout)
    found = {figure: Spread.of(result["samples_ts"])}
    print_table(f"llama.cpp, {options.question}", ["figure", "value"], found.items())
    emit("llamacpp", {"question": options.question, "build": result.get("build_number"), **found}, options)


if __name__ == "__main__":
    main()
