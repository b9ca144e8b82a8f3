"""First token, time per token and throughput compared with another server, when requests arrive at random and in closed loops.

    python -m benchmarks arrivals --contenders ours-defaults ours-no-speculation vllm --model llama-110m --peers peers.toml \
        --bench-python VLLM_ENVIRONMENT/bin/python

Open loop: `vllm bench serve`, run by --bench-python, sends requests at each of --rates by a Poisson process. Closed loop: each
of --clients has one request at a time, sent by this project's light client and by an aiohttp client. Lengths are random, within
half of --prompt and --output. All servers run all the time. In each round they get the same load one after the other,
in reverse order every other round. Percentiles are of all requests of all rounds together. Ratios are a contender's figure by
the last contender's.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.harness.common import REPOSITORY, Cell, Spread, emit, percentile, print_table, wait_quiet
from benchmarks.harness.contenders import BadFile, Server, read_recipes, running_server, values_for
from benchmarks.harness.load import HttpSession, Session, drive
from benchmarks.harness.options import question_parser
from benchmarks.harness.paired import OURS
from benchmarks.harness.programs import ProgramFailed, end_programs_on_sigterm
from benchmarks.harness.workload import spread_batch

SPREAD = 0.5  # of lengths, as a share: 128 +- 64 and 64 +- 32 tokens
FIRST_TOKEN_GOAL, PER_TOKEN_GOAL = 1.0, 0.75  # ratios to the last contender


@dataclass(slots=True)
class Samples:
    """One contender's requests under one load, over all rounds. Times in milliseconds.

    per_token_ms: of each request, its time after the first token, by its further tokens.
    """

    ttft_ms: list[float] = field(default_factory=list)
    per_token_ms: list[float] = field(default_factory=list)
    tok_s: list[float] = field(default_factory=list)  # of each round
    failed: list[str] = field(default_factory=list)

    def add(self, other: "Samples") -> None:
        self.ttft_ms += other.ttft_ms
        self.per_token_ms += other.per_token_ms
        self.tok_s += other.tok_s
        self.failed += other.failed

    def add_request(self, ttft_s: float, whole_s: float, num_tokens: int) -> None:
        self.ttft_ms.append(1e3 * ttft_s)
        if num_tokens > 1:
            self.per_token_ms.append(1e3 * (whole_s - ttft_s) / (num_tokens - 1))

    def figures(self) -> dict[str, Any]:
        """Percentiles over all requests; the median of the rounds' throughput. Raises ValueError if no request was answered."""
        if not self.ttft_ms or not self.per_token_ms:
            raise ValueError(f"no request was answered: {self.failed[:1]}")
        return {
            "requests": len(self.ttft_ms),
            "failed": len(self.failed),
            "errors": sorted(set(self.failed))[:3],
            "ttft_p50_ms": percentile(self.ttft_ms, 50),
            "ttft_p99_ms": percentile(self.ttft_ms, 99),
            "per_token_p50_ms": percentile(self.per_token_ms, 50),
            "per_token_p99_ms": percentile(self.per_token_ms, 99),
            "output_tok_s": Spread.of(self.tok_s),
        }


RATIOS = ("ttft_p50_ms", "ttft_p99_ms", "per_token_p50_ms", "per_token_p99_ms", "output_tok_s")


@dataclass(frozen=True, slots=True)
class Load:
    """A load's name, and the function that puts it on a server in a round."""

    name: str
    run: Callable[[Server, int], Samples]


def open_loop(options: argparse.Namespace, values: Mapping[str, str], rate: float) -> Load:
    """`vllm bench serve` at `rate` requests a second; the seed is the round's, so all contenders get the same requests."""

    def run(server: Server, seed: int) -> Samples:
        with TemporaryDirectory(prefix="llama-bench-") as directory:
            command = [
                *(options.bench_python, "-m", "benchmarks.peers.vllm_bench", "serve", "--backend", "openai"),
                *("--base-url", server.url, "--endpoint", "/v1/completions", "--model", server.model),
                *("--tokenizer", options.bench_tokenizer or values["hf"], "--dataset-name", "random"),
                *("--random-input-len", str(options.prompt), "--random-output-len", str(options.output)),
                *("--random-range-ratio", str(SPREAD), "--num-prompts", str(_share(options.requests, options.rounds))),
                *("--request-rate", str(rate), "--seed", str(seed), "--ignore-eos", "--temperature", "0"),
                *("--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", directory),
                *("--result-filename", "result.json"),
            ]
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=options.timeout_s)
            if done.returncode:
                raise ProgramFailed(
                    f"vllm bench serve: status {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
                )
            return samples_of(json.loads((Path(directory) / "result.json").read_text()))

    return Load(f"{rate:g} req/s", run)


def samples_of(result: Mapping[str, Any]) -> Samples:
    """The file that `vllm bench serve --save-detailed` writes, with one entry for each request, times in seconds."""
    samples = Samples(tok_s=[result["output_throughput"]])
    columns = (result[name] for name in ("ttfts", "latencies", "output_lens", "errors"))
    for ttft_s, whole_s, num_tokens, error in zip(*columns, strict=True):
        if error or not num_tokens:
            samples.failed.append((error or "no token came").strip().splitlines()[-1])
        else:
            samples.add_request(ttft_s, whole_s, num_tokens)
    return samples


def closed_loop(options: argparse.Namespace, values: Mapping[str, str], kind: str, clients: int) -> Load:
    """`clients` clients of one kind, each with one request at a time."""

    def run(server: Server, seed: int) -> Samples:
        requests = spread_batch(
            clients * options.per_client, options.prompt, options.output, SPREAD, int(values["vocab_size"]), seed
        )
        extra = json.loads(server.extra)

        async def measure() -> Samples:
            sessions = [_session(kind, server, extra) for _ in range(clients)]
            try:
                load = await drive(sessions, requests)
            finally:
                await asyncio.gather(*(session.close() for session in sessions))
            good = [answer for answer in load.answers if answer.error is None and answer.token_times]
            failed = [answer.error or "no token came" for answer in load.answers if answer not in good]
            samples = Samples(tok_s=[sum(answer.num_tokens for answer in good) / load.seconds], failed=failed)
            for answer in good:
                whole_s = answer.token_times[-1] - answer.began_s
                samples.add_request(answer.token_times[0] - answer.began_s, whole_s, answer.num_tokens)
            return samples

        return uvloop.run(measure())

    return Load(f"{clients} clients, {kind}", run)


def _session(kind: str, server: Server, extra: dict[str, Any]) -> Session:
    if kind == "light":
        return HttpSession(server.url, server.model, extra)
    from benchmarks.harness.aiohttp_client import AiohttpSession

    return AiohttpSession(server.url, server.model, extra)


def _share(total: int, rounds: int) -> int:
    return -(-total // rounds)


def take_turns(
    servers: Sequence[Server], loads: Sequence[Load], rounds: int, wait: Callable[[], object]
) -> dict[str, dict[str, Samples]]:
    """Samples by load and contender. The servers take turns at each load; the order is reversed every other round.

    Each load of each round has its own seed: a prompt that a server has seen before would be found in its prefix cache.
    """
    found = {load.name: {server.name: Samples() for server in servers} for load in loads}
    for number in range(rounds):
        for at, load in enumerate(loads):
            for server in servers if number % 2 == 0 else servers[::-1]:
                wait()
                found[load.name][server.name].add(load.run(server, 1 + number * len(loads) + at))
        print(f"round {number + 1} of {rounds} is done", file=sys.stderr)
    return found


def summary(found: Mapping[str, Mapping[str, Samples]]) -> dict[str, Any]:
    """Figures by load and contender, and the ratios to the last contender's. Raises ValueError where one of those is 0."""
    loads: dict[str, Any] = {}
    for load, contenders in found.items():
        figures = {name: samples.figures() for name, samples in contenders.items()}
        *others, last = figures
        ratios = {
            name: {figure: _ratio(figures[name][figure], figures[last][figure], figure) for figure in RATIOS}
            for name in others
        }
        loads[load] = {"contenders": figures, "ratios": ratios}
    return loads


def _ratio(ours: float | Spread, theirs: float | Spread, figure: str) -> float:
    one, other = (value.median if isinstance(value, Spread) else value for value in (ours, theirs))
    if not other:
        raise ValueError(f"the last contender's {figure} is 0, so there is no ratio to it")
    return one / other


def meets_goals(ratios: Mapping[str, float]) -> bool:
    first = max(ratios["ttft_p50_ms"], ratios["ttft_p99_ms"])
    return first <= FIRST_TOKEN_GOAL and ratios["per_token_p50_ms"] <= PER_TOKEN_GOAL


def show(loads: Mapping[str, Any]) -> None:
    columns = ["load", "contender", "TTFT p50 ms", "p99", "per token p50 ms", "p99", "tok/s", "requests", "failed"]
    rows: list[tuple[Cell | Spread, ...]] = [
        (load, name, *(one[figure] for figure in RATIOS), one["requests"], one["failed"])
        for load, result in loads.items()
        for name, one in result["contenders"].items()
    ]
    print_table("Figures of all rounds", columns, rows)
    print_table(
        "Ratios to the last contender",
        ["load", "contender", "TTFT p50", "p99", "per token p50", "p99", "tok/s", "goals"],
        [
            (load, name, *(ratios[figure] for figure in RATIOS), "met" if meets_goals(ratios) else "MISSED")
            for load, result in loads.items()
            for name, ratios in result["ratios"].items()
        ],
    )


def main(argv: Sequence[str]) -> None:
    parser = question_parser("arrivals", __doc__)
    parser.add_argument(
        "--contenders", nargs="+", default=["ours-defaults", "ours-no-speculation", "vllm"], metavar="NAME"
    )
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="files like peers.example.toml")
    parser.add_argument("--model", default="demo", help="one of [models] in the files")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rates", type=float, nargs="*", default=[2, 6, 9], help="requests a second of the open loop")
    parser.add_argument("--requests", type=int, default=200, help="of each rate, over all rounds")
    parser.add_argument("--clients", type=int, nargs="*", default=[8, 32], help="of the closed loop")
    parser.add_argument("--kinds", nargs="+", default=["light", "aiohttp"], choices=("light", "aiohttp"))
    parser.add_argument("--per-client", type=int, default=6, help="requests of each client in a round")
    parser.add_argument("--prompt", type=int, default=128, help="tokens, within half of it")
    parser.add_argument("--output", type=int, default=64, help="tokens, within half of it")
    parser.add_argument(
        "--bench-python", default=sys.executable, help="a Python that can import vLLM, for the open loop"
    )
    parser.add_argument("--bench-tokenizer", help="for the open loop; the model's hf directory if absent")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of one open loop")
    parser.add_argument("--quiet-cores", type=float, default=0.25, help="wait until others keep fewer cores busy")
    parser.add_argument("--patience-s", type=float, default=60.0, help="how long to wait for that")
    options = parser.parse_args(argv)
    end_programs_on_sigterm()
    try:
        recipes = read_recipes([OURS, *options.peers])
        if unknown := [name for name in options.contenders if name not in recipes.contenders]:
            raise BadFile(f"no file describes {', '.join(unknown)}; there are {', '.join(recipes.contenders)}")
        values = values_for(recipes, options.model, options.dtype, {})
        loads = [open_loop(options, values, rate) for rate in options.rates]
        loads += [closed_loop(options, values, kind, clients) for clients in options.clients for kind in options.kinds]
        with ExitStack() as stack:
            servers = [
                stack.enter_context(running_server(recipes.contenders[name], values)) for name in options.contenders
            ]
            for server in servers:
                closed_loop(options, values, "light", 4).run(server, 0)  # warms up; not counted
            found = take_turns(
                servers, loads, options.rounds, lambda: wait_quiet(options.quiet_cores, options.patience_s)
            )
        result = summary(found)
    except (BadFile, ProgramFailed, ValueError, subprocess.TimeoutExpired) as error:
        parser.exit(2, f"{error}\n")
    show(result)
    about = {"model": options.model, "dtype": options.dtype, "rounds": options.rounds}
    emit("arrivals", {**about, "prompt": options.prompt, "output": options.output, "loads": result}, options)
