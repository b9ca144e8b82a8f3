"""Ends a rank's process for certain, on this node or on another."""

import asyncio
import logging
from contextlib import suppress
from typing import Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.driver.ray_calls import first_line, in_passing_thread, result_of
from cluster.wire.process_end import end_process
from cluster.wire.rank_status import RankIdentity

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.5


async def end_rank(identity: RankIdentity, patience_s: float, timeout_s: float) -> bool:
    """Give the process `patience_s` to end by itself, then kill it. Returns whether it is gone within `timeout_s` more.

    On another node a Ray task does this; a node that is lost has taken its processes with it.
    """
    timing = (identity.process, patience_s, timeout_s)
    if identity.node_id == ray.get_runtime_context().get_node_id():
        return await in_passing_thread(end_process, *timing)
    there = NodeAffinitySchedulingStrategy(identity.node_id, soft=False)
    end_remotely = ray.remote(num_cpus=0, max_retries=0)(end_process).options(scheduling_strategy=there)
    ending = asyncio.create_task(result_of(end_remotely.remote(*timing)))
    losing = asyncio.create_task(_loss_of_node(identity.node_id))  # the task on a lost node may fail much later
    try:
        async with asyncio.timeout(timeout_s * 2):
            await asyncio.wait((ending, losing), return_when=asyncio.FIRST_COMPLETED)
        return losing.done() or bool(await ending)
    except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):
        return True
    except (ray.exceptions.RayError, TimeoutError) as error:
        logger.warning("rank %d: cannot run a task on its node to end it: %s", identity.rank, first_line(error))
        return False
    finally:
        ending.cancel()
        losing.cancel()


async def _loss_of_node(node_id: str) -> None:
    """Returns when Ray considers the node dead."""
    while True:
        with suppress(Exception):  # Ray did not answer: the node's state is unknown, which is no loss yet
            if not any(node["NodeID"] == node_id and node["Alive"] for node in await in_passing_thread(ray.nodes)):
                return
        await asyncio.sleep(_POLL_S)
