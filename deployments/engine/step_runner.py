"""The interface between the engine loop and the ranks."""

import asyncio
from typing import Protocol

from llama_core.scheduling.step import StepInput, StepOutput


class StepRunner(Protocol):
    """Computes steps: takes a step at once, without the delay of a task, and answers steps in their order.

    Implemented by `cluster.driver.rank_group.RankGroup`. `submit` may raise what its future would.
    """

    def submit(self, batch: StepInput) -> asyncio.Future[StepOutput]: ...
