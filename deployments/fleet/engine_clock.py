"""What one engine tells the policies of `scaling.py`: how much of its time its work takes, and the time for what waits.

Decode rows share a pass over the weights, so an engine with one row runs steps all the time and is far from full. Its work is
therefore counted by its own step costs: a prompt's token its time, a sampled token its share of a step of a full batch.
"""

import time

from deployments.engine.live_streams import MeasuredStream
from deployments.engine.step_report import StepStats
from deployments.fleet.scaling import BUSY, DELAY_S, HELD, HELD_MS, KV_USE, QUEUED_MS, SEQUENCES
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.step_costs import StepCosts

_WEIGHT = 1 / 16  # of the newest ended sequence


class EngineClock:
    """Give it every step and every ended sequence; each `read` ends an interval."""

    def __init__(self) -> None:
        self._mean_output = 0.0  # tokens of a sequence
        self._begin()

    def _begin(self) -> None:
        self._since_s = time.monotonic()
        self._elapsed_ms = 0.0
        self._num_steps = self._num_prompt_tokens = self._num_sampled = 0
        self._waits: list[tuple[float, int]] = []  # for a first token, and the prompt's own tokens

    def on_step(self, stats: StepStats) -> None:
        self._elapsed_ms += stats.elapsed_ms
        self._num_steps += 1
        self._num_prompt_tokens += stats.num_computed
        self._num_sampled += stats.num_sampled

    def on_end(self, stream: MeasuredStream) -> None:
        seq, wait_s = stream.sequence, stream.timeline.first_token_after_s
        self._mean_output += (seq.length - seq.prompt_len - self._mean_output) * (_WEIGHT if self._mean_output else 1.0)
        if wait_s is not None:
            self._waits.append((wait_s, seq.prompt_len - (seq.num_cached or 0)))

    def read(self, scheduler: Scheduler, num_held: int, num_held_tokens: int) -> dict[str, float]:
        """num_held: streams that fronts hold for an engine of this model, and their tokens. All values are numbers: Serve
        takes no others."""
        costs, num_slots = scheduler.speculation.costs or StepCosts(), scheduler.config.max_batch_size
        prompt_ms = costs.prompt_token_ms or 0.0
        token_ms = _token_ms(costs, self._num_sampled / max(1, self._num_steps), num_slots)
        sequence_ms = self._mean_output * token_ms  # without its prompt
        known_ms = self._num_prompt_tokens * prompt_ms + self._num_sampled * token_ms
        work_ms = min(self._elapsed_ms, known_ms or self._elapsed_ms)
        interval_ms = max(1e-3, time.monotonic() - self._since_s) * 1e3
        num_without_slot = scheduler.num_waiting - scheduler.num_background_waiting
        num_without_slot = max(0, num_without_slot - (num_slots - scheduler.num_running))
        delays = [max(0.0, wait_s - num_tokens * prompt_ms / 1e3) for wait_s, num_tokens in self._waits]
        self._begin()
        return {
            SEQUENCES: scheduler.num_running + scheduler.num_waiting,
            BUSY: min(1.0, work_ms / interval_ms),
            KV_USE: scheduler.pool.num_used / scheduler.pool.num_blocks,
            QUEUED_MS: _num_queued_tokens(scheduler) * prompt_ms + num_without_slot * sequence_ms,
            DELAY_S: sum(delays) / len(delays) if delays else 0.0,
            HELD: num_held,
            HELD_MS: num_held_tokens * prompt_ms + num_held * sequence_ms,
        }


def _token_ms(costs: StepCosts, num_rows: float, num_slots: int) -> float:
    """A sampled token's share of a step of a full batch; from steps of about `num_rows` rows, where there were none."""
    one, full = costs.decode_ms(1) or 0.0, costs.decode_ms(num_slots) or 0.0
    here = costs.decode_ms(round(num_rows)) or 0.0
    if num_rows > 1:
        full = max(full, one + (here - one) / (num_rows - 1) * (num_slots - 1))
    return full / num_slots


def _num_queued_tokens(scheduler: Scheduler) -> int:
    """Of prompts, to be computed."""
    pending = (seq.length - seq.scheduled for seq in scheduler.live())
    return sum(num_tokens for num_tokens in pending if num_tokens > 1)
