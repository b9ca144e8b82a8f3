"""`python -m benchmarks` lists the commands; `python -m benchmarks NAME [options]` runs one, `NAME --help` explains it."""

import importlib
import sys
from collections.abc import Sequence
from typing import Final

# Each command's module has `main(argv)`, which ends by printing its result as one line of JSON where it measures something.
QUESTIONS: Final = {
    "limits": "the best that this machine can do: read bandwidth, matrix products",
    "decode": "tokens a second of one sequence, compared with the memory bandwidth",
    "prefill": "prefill speed, compared with a matrix product",
    "offline": "output tokens a second of 32 requests of mixed lengths, in process",
    "online": "throughput and latency at 1, 8 and 32 clients of a server, in a closed loop",
    "arrivals": "latency and throughput compared with another server, in open and closed loops",
    "overload": "goodput and refusals at twice the requests that a server can serve",
    "refusals": "latency of /health while clients send large bodies that are all refused",
    "neighbour": "throughput while another process keeps a core busy",
    "step": "where the time of a decode step goes",
    "growth": "how a decode step grows with rows and context",
    "prefix": "what prefix caching saves",
    "speculation": "what prompt lookup gains and costs",
    "grammars": "what structured output costs its own rows and those beside them",
    "slow_grammars": "what streams lose beside a request whose grammar is slow",
    "quality": "what quantized weights cost in perplexity",
    "agreement": "whether a GGUF model answers as transformers does, on 1, 2 and 3 ranks",
    "gpu": "tests, speed, memory and recovery on one CUDA device, in half an hour",
    "loading": "GB/s at which a rank reads its weights, beside plain reads of the files",
    "startup": "seconds from the command to the first good answer",
    "memory": "processes, threads and resident memory of a server",
    "fanout": "time of a step's round trip to the ranks",
    "streaming": "processor time of a streamed token and of a request outside the ranks",
    "tracing": "processor time that traces cost",
    "scheduler": "what a scheduling decision costs",
}
TOOLS: Final = {
    "paired": ("benchmarks.harness.paired", "measure our server and others in alternating rounds of one run"),
    "make_checkpoint": ("benchmarks.harness.make_checkpoint", "write random checkpoints of known shapes"),
    "serve_ours": ("benchmarks.harness.serve_ours", "start our server on a given port, as `paired` does"),
    "report": ("benchmarks.report.report", "write the tables of docs/performance.md from benchmarks/results"),
    "plot": ("benchmarks.report.plot", "draw docs/performance.svg from benchmarks/results"),
}
MODULES: Final = {name: f"benchmarks.questions.{name}" for name in QUESTIONS} | {
    name: module for name, (module, _) in TOOLS.items()
}


def listing() -> str:
    """One line for each command."""
    lines = ["usage: python -m benchmarks NAME [options]", "", "questions:"]
    lines += [f"  {name:<16}{line}" for name, line in QUESTIONS.items()]
    lines += ["", "tools:"]
    return "\n".join([*lines, *(f"  {name:<16}{line}" for name, (_, line) in TOOLS.items())])


def main(argv: Sequence[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(listing())
        return
    if argv[0] not in MODULES:
        sys.exit(f"there is no benchmark {argv[0]}\n\n{listing()}")
    importlib.import_module(MODULES[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
