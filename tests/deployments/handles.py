"""The deployment's class over fake ranks, without Serve."""

from typing import Any

from deployments.args import ServerArgs
from deployments.engine.service import LlamaService
from deployments.fleet.own_engine import OwnEngine
from deployments.observe.metrics import Metrics
from deployments.replicas.ingress import LlamaIngress
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool


def ingress_over(group: FakeGroup, **args: Any) -> Any:
    """The API by handle of a replica that has not started: its constructor, which calls Serve, has not run."""
    made = object.__new__(LlamaIngress)
    made.metrics = Metrics(in_ray=False)
    given = ServerArgs(**{"ckpt_dir": str(GOLDEN / "mp1")} | args)
    made.service = OwnEngine(LlamaService(given, FakeGroupPool(lambda: group)), given)
    return made
