"""Nodes of Ray without the processes that no test uses, whose starts take most of a small cluster's processor time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray._private.node

from deployments.local.small_cluster import NodeWithoutAgent, replaced


class _Node(NodeWithoutAgent):
    """A node without the dashboard's agent and the autoscaler's monitor."""

    def __init__(self, ray_params: Any, **options: Any) -> None:
        ray_params.update(no_monitor=True)
        super().__init__(ray_params, **options)


class _SilentNode(_Node):
    """And without the log monitor, which sends the output of workers to drivers."""

    def __init__(self, ray_params: Any, **options: Any) -> None:
        ray_params.update(include_log_monitor=False)
        super().__init__(ray_params, **options)


@contextmanager
def few_processes(*, logs_to_driver: bool = False) -> Iterator[None]:
    """Clusters that are started in this context consist of such nodes, and start workers only on demand."""
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 (Ray reads this name)
    with replaced(ray._private.node, "Node", _Node if logs_to_driver else _SilentNode):
        yield
