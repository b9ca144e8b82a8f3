"""Ranks without a model, so that the rest of a server can be measured.

`build_app` is our application with such ranks, for the import_path of a serve configuration. Environment variables say the
time of a step: PACED_STEP_MS, and for each token of a prompt PACED_TOKEN_MS, for each decode row PACED_ROW_MS. The ranks answer
at once if all are 0. They have PACED_BLOCKS cache blocks.
"""

import os
import time
from collections.abc import Callable

from ray.serve import Application

import deployments.app
from cluster.wire.rank_runner import RendezvousSpec
from deployments.args import ServerArgs
from llama_core.config import EngineConfig
from llama_core.rank_report import RankReport
from llama_core.scheduling.step import Pending, StepInput, StepOutput
from llama_core.scheduling.step_costs import StepShape

STEP_MS = "PACED_STEP_MS"
TOKEN_MS, ROW_MS, NUM_BLOCKS = "PACED_TOKEN_MS", "PACED_ROW_MS", "PACED_BLOCKS"
_FIRST_TEXT_ID = 259  # after control and byte pieces


class PacedRunner:
    """Implements `cluster.wire.rank_runner.RankRunner`: samples tokens without repetition. A step begins when the previous one
    has ended, as on a device."""

    report = RankReport()

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._costs_s = [float(os.environ.get(name, "0")) / 1e3 for name in (STEP_MS, TOKEN_MS, ROW_MS)]
        self._free_at_s = 0.0

    def max_num_blocks(self) -> int:
        return int(os.environ.get(NUM_BLOCKS, "4096"))

    def seconds_waited(self) -> float | None:
        return None

    def seconds_sampled(self) -> float | None:
        return None

    def allocate_cache(self, num_blocks: int) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def start(self, batch: StepInput) -> Pending[StepOutput]:
        shape, (base_s, token_s, row_s) = StepShape.of(batch), self._costs_s
        step_s = base_s + token_s * shape.num_prompt_tokens + row_s * shape.num_decodes
        if step_s:
            self._free_at_s = max(self._free_at_s, time.monotonic()) + step_s
            time.sleep(max(0.0, self._free_at_s - time.monotonic()))
        num_texts = self._vocab_size - _FIRST_TEXT_ID
        tokens = [
            _FIRST_TEXT_ID + 7919 * (row.start + row.length + 131 * row.slot) % num_texts
            for row in batch.rows
            if row.samples
        ]
        return Pending.done(StepOutput(batch.epoch, batch.step, tokens, elapsed_ms=1e3 * step_s))


def make_paced_runner(
    config: EngineConfig, rendezvous: RendezvousSpec, on_progress: Callable[[int, int], None]
) -> PacedRunner:
    return PacedRunner(config.vocab_size)


class PacedArgs(ServerArgs):
    """The server's arguments, with ranks that run `make_paced_runner`."""

    runner_factory: str | None = "benchmarks.harness.paced:make_paced_runner"


def build_app(args: PacedArgs) -> Application:
    return deployments.app.build_app(args)
