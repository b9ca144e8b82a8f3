"""Run by test_two_nodes.py as a program: a cluster of two nodes with one rank on each. A process can call ray.init only once.

Prints its observations as one line of JSON. At the end the second node is lost under live streams. With the argument `full` a
node is lost before, under a group of ranks without a service, and another one joins afterwards.
"""

import asyncio
import dataclasses
import json
import logging
import os
import signal
import sys
import time
from typing import Any

import ray
import uvloop
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group

from cluster.driver.group_info import GroupInfo, GroupLimits
from cluster.driver.placement import shortage
from cluster.driver.rank_group import RankGroup
from cluster.driver.standby import StandbyPool
from cluster.wire.process_end import is_running
from deployments.args import ServerArgs
from deployments.engine import supervisor
from deployments.engine.service import LlamaService
from deployments.fleet.own_engine import OwnEngine
from llama_core.errors import RankFailure
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import SlotInit, StepInput
from tests.conftest import GOLDEN
from tests.support.fake_runner import CONFIG, FakeFactory, step_input, tokens_of
from tests.support.ray_nodes import few_processes
from tests.support.requests import submit
from tests.support.waiting import until, until_true

LIMITS = GroupLimits(start_timeout_s=180, step_timeout_s=5)
BUNDLES = [{"memory": 2**20}, {"CPU": 1.0}, {"CPU": 1.0}]


def one_row(step: int, epoch: int) -> StepInput:
    """A step that samples one token in slot 3. Step 1 also admits prompts of 0.5 MB in all to the other slots."""
    batch = step_input(step, epoch, slots=(3,))
    if step == 1:
        others = [
            SlotInit(slot, [31_999] * 4096, list(range(256)), SamplingParams()) for slot in range(32) if slot != 3
        ]
        batch = dataclasses.replace(batch, admit=[*batch.admit, *others])
    return batch


def gone(info: GroupInfo) -> bool:
    return not any(is_running(identity.process) for identity in info.identities)


async def main(cluster: Cluster, second_node: Any, *, is_full: bool) -> dict[str, object]:
    seen: dict[str, object] = {}
    seen["shortage"] = shortage([{"CPU": 3.0}] * 2, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    placement = placement_group(BUNDLES, strategy="PACK")
    await asyncio.wait_for(placement.ready(), 120)

    group = RankGroup(CONFIG, placement, epoch=1, limits=LIMITS, runner_factory=FakeFactory())
    info = await group.start()
    seen["nodes"] = len({identity.node_id for identity in info.identities})
    assert group._listener is not None
    seen["host"] = group._listener._host
    outputs = await asyncio.gather(*(group.submit(one_row(step, 1)) for step in range(50)))
    seen["tokens"] = [output.tokens for output in outputs] == [tokens_of(step, (3,)) for step in range(50)]
    began = time.perf_counter()
    for step in range(50, 250):
        await group.submit(one_row(step, 1))
    seen["tls_ms_per_step"] = (time.perf_counter() - began) * 1e3 / 200

    driver_node = ray.get_runtime_context().get_node_id()
    (far,) = (identity for identity in info.identities if identity.node_id != driver_node)
    os.kill(far.process.pid, signal.SIGSTOP)
    group.submit(one_row(250, 1)).add_done_callback(lambda result: result.exception())
    failure = await group.wait_failed()
    await group.stop()
    seen["stopped"] = (failure.rank == far.rank, gone(info))
    if is_full:
        seen |= await lost(cluster, second_node, placement)
        second_node = cluster.add_node(num_cpus=1)
    return seen | await with_fewer_ranks(cluster, second_node, placement, grows=is_full)


async def lost(cluster: Cluster, second_node: Any, placement: PlacementGroup) -> dict[str, object]:
    """The second node is lost under a group of ranks."""
    seen: dict[str, object] = {}
    driver_node = ray.get_runtime_context().get_node_id()
    group = RankGroup(CONFIG, placement, epoch=2, limits=LIMITS, runner_factory=FakeFactory())
    info = await group.start()
    await group.submit(one_row(0, 2))
    (far,) = (identity for identity in info.identities if identity.node_id != driver_node)
    began = time.monotonic()
    removing = asyncio.get_running_loop().run_in_executor(
        None, lambda: cluster.remove_node(second_node, allow_graceful=False)
    )
    failure = await group.wait_failed()
    seen["node_loss_s"] = time.monotonic() - began
    await asyncio.wait_for(group.stop(), 60)
    await removing
    seen["group_lost"] = (isinstance(failure, RankFailure), failure.rank == far.rank, gone(info))
    return seen


async def with_fewer_ranks(cluster: Cluster, node: Any, placement: PlacementGroup, *, grows: bool) -> dict[str, object]:
    """The reference's tokens from a service, and its live streams while the second rank's node is lost. grows: and after a node
    joins."""
    seen: dict[str, object] = {}
    pool = StandbyPool(placement, GroupLimits(start_timeout_s=180, step_timeout_s=20), enabled=False)

    async def is_usable() -> bool:
        return await pool.usable_bundles() == [1, 2]

    await until("the new node's bundle is usable", is_usable, pause_s=0.3)
    vars(supervisor)["ROOM_CHECK_S"] = 1.0
    fields = {"ckpt_dir": str(GOLDEN / "mp2"), "max_seq_len": 256, "shrink_after_s": 4.0, "dtype": "float32"}
    args = ServerArgs(**fields)
    service = LlamaService(args, pool)
    front = OwnEngine(service, args)
    await front.start()
    try:
        assert service.info is not None
        first = service.info
        seen["golden_nodes"] = len({identity.node_id for identity in first.identities})
        seen["golden"] = await golden_tokens(front)
        undisturbed = await asyncio.gather(*(read(front, number) for number in range(4)))
        stopping, answers = asyncio.Event(), []

        async def ask_on(number: int) -> None:
            while not stopping.is_set():
                answers.append(await read(front, number) == undisturbed[number])
                await asyncio.sleep(0.1)  # leaves processor time to the processes that start

        streams = [asyncio.create_task(ask_on(number)) for number in range(4)]
        await asyncio.sleep(0.5)
        began = time.monotonic()
        # Beside the wait, because the recovery may be over when a busy machine has removed the node.
        removing = asyncio.create_task(asyncio.to_thread(lambda: cluster.remove_node(node, allow_graceful=False)))
        await phase(service, "recovering")
        seen["noticed_s"] = time.monotonic() - began
        await removing
        await phase(service, "ready")
        seen["shrunk_s"] = time.monotonic() - began
        seen["shrunk"] = (service.describe().world_size, service.readiness().detail)
        seen["lost_ranks_are_gone"] = gone(first)
        await more(answers)
        if grows:
            cluster.add_node(num_cpus=1)  # works only in the main thread; the streams wait for it
            await until_true(
                "two ranks serve", lambda: service.describe().world_size == 2 and service.readiness().ready, 180
            )
            seen["grown"] = service.describe().world_size
            await more(answers)
        stopping.set()
        await asyncio.gather(*streams)
        seen["same"] = all(answers)
    finally:
        await front.stop()
    return seen


async def golden_tokens(front: OwnEngine) -> bool:
    """Whether the completions of the reference without echo have its tokens."""
    golden = json.loads((GOLDEN / "golden.json").read_text())
    cases = [case for case in golden["completions"] if not case["echo"]]
    found = [
        tokens_after(front, prompt, len(expected))
        for case in cases
        for prompt, expected in zip(case["prompt_tokens"], case["out_tokens"], strict=True)
    ]
    return await asyncio.gather(*found) == [expected for case in cases for expected in case["out_tokens"]]


async def tokens_after(front: OwnEngine, prompt: list[int], max_tokens: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [token async for delta in submit(front, prompt, params) for token in delta.tokens]


async def read(front: OwnEngine, number: int) -> list[int]:
    return await tokens_after(front, [1, 5 + number, 9], 200)


async def more(answers: list[bool]) -> None:
    """Wait until every stream that is live now has ended."""
    wanted = len(answers) + 2 * 4
    await until_true("the live streams have ended", lambda: len(answers) >= wanted, 180)


async def phase(service: LlamaService, name: str) -> None:
    await until_true(f"the service is {name}", lambda: service.readiness().phase == name, 180)


if __name__ == "__main__":
    # A node without its process is dead after 6 s instead of Ray's 30; a node that is only busy has a minute.
    health_checks = {
        "health_check_period_ms": 1000,
        "health_check_timeout_ms": 10_000,
        "health_check_failure_threshold": 6,
    }
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": health_checks}
    with few_processes():
        cluster = Cluster(initialize_head=True, head_node_args=head)
        second = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, logging_level=logging.WARNING, log_to_driver=False)
        try:
            print("SEEN " + json.dumps(uvloop.run(main(cluster, second, is_full=sys.argv[1:] == ["full"]))))
        finally:
            ray.shutdown()
            cluster.shutdown()
