"""A rank's runner without a model, for benchmarks of everything around the forward pass."""

from llama_core.execution.load_report import LoadReport
from llama_core.scheduling.step import Pending, StepInput, StepOutput

_TOKEN = 31_999


class NullRunner:
    """Implements `cluster.wire.rank_runner.RankRunner`. Samples the same token for every row and computes nothing."""

    report = LoadReport()
    num_blocks = 1

    def max_num_blocks(self) -> int:
        return self.num_blocks

    def seconds_waited(self) -> float | None:
        return None

    def seconds_sampled(self) -> float | None:
        return None

    def allocate_cache(self, num_blocks: int) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def start(self, batch: StepInput) -> Pending[StepOutput]:
        return Pending.done(StepOutput(batch.epoch, batch.step, [_TOKEN] * len(batch.rows)))
