"""What routing costs a front: a choice among engines, the index of their caches, and frames that tell of a changed load.

    python -m benchmarks routing

There is no network: engines are links that have been told their state. A choice leaves out the hashes of the prompt.
"""

import asyncio
import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, cast

from benchmarks.harness.common import emit, percentile, print_table
from benchmarks.harness.options import question_parser
from cluster.wire.messages import HEADER_BYTES, frame
from deployments.engine.interface import EngineState
from deployments.fleet.placement import Placement
from deployments.links import messages
from deployments.links.affinity import PrefixIndex, PromptPrefixes, shortened
from deployments.links.link import Link, RoutedStream
from llama_core.scheduling.prefix_cache import prefix_hash, root_hash
from llama_core.scheduling.request import Sequence as Seq
from llama_core.scheduling.request import Terms
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step_costs import CostModel

BLOCK_SIZE = 16
GOAL_US, GOAL_MB, GOAL_SHARE = (
    100.0,
    60.0,
    0.02,
)  # of a choice at p99, of the index, and of a front's time for frames of load


class ToldLink(Link):
    def send(self, message: messages.FromFront) -> None:
        pass

    def close(self) -> None:
        pass


class ToldPlacement(Placement):
    def on_step(self, link: Link, step: messages.Step) -> None:
        pass

    def _fail(self, live: RoutedStream, error: Exception) -> None:
        raise error


def link_of(number: int, num_blocks: int, index: PrefixIndex) -> ToldLink:
    link = ToldLink(f"engine {number}", "host", index)
    state = {"block_size": BLOCK_SIZE, "max_batch_size": 64, "max_step_tokens": 2048, "blocks_total": num_blocks}
    link.state = EngineState(phase="ready", max_queue=128, **cast(Any, state))
    link.costs = CostModel(10.0, 0.2, 0.08, 0.0, 300.0)
    link.load = messages.Load(0, number, 0, 1000 * number, num_blocks // 2)
    return link


def timed_us(function: Callable[[], object], count: int) -> list[float]:
    times = []
    gc.collect()
    gc.disable()
    for _ in range(count):
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1e6)
    gc.enable()
    return times


async def measured(options: Any) -> dict[str, Any]:
    draw, prefix, hashes = random.Random(1), root_hash(""), list[bytes]()
    prompt = [draw.randrange(32_000) for _ in range(options.tokens)]
    for begin in range(0, options.tokens - BLOCK_SIZE + 1, BLOCK_SIZE):
        prefix = prefix_hash(prefix, prompt[begin : begin + BLOCK_SIZE])
        hashes.append(shortened(prefix))
    prefixes = PromptPrefixes(Terms(), prompt)
    prefixes.keys(BLOCK_SIZE)
    stream = type("Stream", (), {"sequence": Seq(prompt, SamplingParams(), options.tokens + 1000)})()
    choices, size_mb = {}, 0.0
    for name, share in (("unknown", 0.0), ("half known", 0.5), ("known", 1.0)):
        known = hashes[: int(len(hashes) * share)]
        tracemalloc.start()
        index = PrefixIndex()
        links = [link_of(number, options.blocks, index) for number in range(options.engines)]
        for link in links:
            own = [draw.randbytes(8) for _ in range(options.blocks - len(known))]
            index.learn(link, [*own, *known], [], is_whole=True)
        del own
        size_mb = max(size_mb, tracemalloc.get_traced_memory()[0] / 1e6)
        tracemalloc.stop()
        placement = ToldPlacement("model", 60.0, {})
        lives = [RoutedStream(stream, prefixes)]
        choices[name] = timed_us(lambda: placement._by_policy(links, lives), options.count)  # noqa: B023
        placement._ticking.cancel()
    payload = frame(messages.Step(messages.Load(7, 9, 3, 12_345, 20_000)))[HEADER_BYTES:]
    frames = timed_us(lambda: links[0].take(messages.decode_from_engine(payload)), options.count)
    share = options.engines / messages.LOAD_S * percentile(frames, 50) / 1e6
    return {"choices_us": choices, "index_mb": size_mb, "frame_us": percentile(frames, 50), "frames_share": share}


def main(argv: Sequence[str]) -> None:
    parser = question_parser("routing", __doc__)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=30_000, help="of each engine's cache")
    parser.add_argument("--tokens", type=int, default=12_000, help="of the prompt")
    parser.add_argument("--count", type=int, default=3000)
    options = parser.parse_args(argv)
    found = asyncio.run(measured(options))
    choices = {name: [percentile(times, 50), percentile(times, 99)] for name, times in found["choices_us"].items()}
    print_table(
        f"A choice among {options.engines} engines for {options.tokens} tokens, us",
        ["prompt", "median", "p99"],
        [[name, *values] for name, values in choices.items()],
    )
    share = f"{found['frames_share']:.2%} of a front at most"
    print(f"index {found['index_mb']:.1f} MB; a frame of load {found['frame_us']:.1f} us, {share}")
    goals = {"goal_us": GOAL_US, "goal_mb": GOAL_MB, "goal_share": GOAL_SHARE}
    emit("routing", {**found, "choices_us": choices, **goals}, options)
