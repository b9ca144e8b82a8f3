"""What one engine tells the policies of `scaling.py`: how much of its time its work takes, and the time for what waits.

Decode rows share a pass over the weights, so an engine with one row runs steps all the time and is far from full. Its work is
therefore counted by its own step costs: a prompt's token its time, a sampled token its share of a step of a full batch.
"""

import time

from deployments.engine.engine_loop import EngineLoop
from deployments.engine.live_streams import MeasuredStream
from deployments.engine.step_report import StepStats
from deployments.fleet.scaling import BUSY, DELAY_S, HELD, HELD_MS, KV_USE, QUEUED_MS, SEQUENCES


class EngineClock:
    """Give it every step and every ended sequence; each `read` ends an interval."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._since_s = time.monotonic()
        self._elapsed_ms = 0.0
        self._num_prompt_tokens = self._num_sampled = 0
        self._waits: list[tuple[float, int]] = []  # for a first token, and the prompt's own tokens

    def on_step(self, stats: StepStats) -> None:
        self._elapsed_ms += stats.elapsed_ms
        self._num_prompt_tokens += stats.num_computed
        self._num_sampled += stats.num_sampled

    def on_end(self, stream: MeasuredStream) -> None:
        seq, wait_s = stream.sequence, stream.timeline.first_token_after_s
        if wait_s is not None:
            self._waits.append((wait_s, seq.prompt_len - (seq.num_cached or 0)))

    def read(self, loop: EngineLoop, num_held: int, num_held_tokens: int) -> dict[str, float]:
        """num_held: streams that fronts hold for an engine of this model, and their tokens. All values are numbers: Serve
        takes no others."""
        scheduler, costs = loop.scheduler, loop.costs
        num_slots = scheduler.config.max_batch_size
        token_ms = costs.base_ms / num_slots + costs.row_ms
        sequence_ms = costs.output_tokens * token_ms  # without its prompt
        known_ms = self._num_prompt_tokens * costs.token_ms + self._num_sampled * token_ms
        work_ms = min(self._elapsed_ms, known_ms or self._elapsed_ms)
        interval_ms = max(1e-3, time.monotonic() - self._since_s) * 1e3
        num_waiting = scheduler.num_waiting - scheduler.num_background_waiting
        num_without_slot = max(0, num_waiting - (num_slots - scheduler.num_running))
        delays = [max(0.0, wait_s - num_tokens * costs.token_ms / 1e3) for wait_s, num_tokens in self._waits]
        self._begin()
        return {
            SEQUENCES: scheduler.num_running + scheduler.num_waiting,
            BUSY: min(1.0, work_ms / interval_ms),
            KV_USE: scheduler.pool.num_used / scheduler.pool.num_blocks,
            QUEUED_MS: scheduler.num_queued_tokens * costs.token_ms + num_without_slot * sequence_ms,
            DELAY_S: sum(delays) / len(delays) if delays else 0.0,
            HELD: num_held,
            HELD_MS: num_held_tokens * costs.token_ms + num_held * sequence_ms,
        }
