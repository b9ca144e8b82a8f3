"""The times of one sequence's stages, for metrics and traces. Knows nothing of HTTP, Ray or OpenTelemetry."""

from dataclasses import dataclass


@dataclass(slots=True)
class Timeline:
    """When the stages of a sequence began, by time.monotonic; None for a stage that has not begun.

    num_steps, forward_ms: the steps that gave the sequence tokens after its first ones, and their durations on rank 0.
    detokenize_s: the time of turning tokens into text; 0 where nobody measures it.
    """

    submitted_s: float
    admitted_s: float | None = None  # to the batch, for the first time
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    num_steps: int = 0
    forward_ms: float = 0.0
    prefill_ms: float = 0.0  # the step that gave the first token
    detokenize_s: float = 0.0

    def gained(self, now_s: float, elapsed_ms: float) -> float | None:
        """A step of `elapsed_ms` has given the sequence tokens. Returns the seconds since its last ones; None for the first."""
        last_s, self.last_token_s = self.last_token_s, now_s
        if last_s is None:
            self.first_token_s = now_s
            self.prefill_ms = elapsed_ms
            return None
        self.num_steps += 1
        self.forward_ms += elapsed_ms
        return now_s - last_s

    @property
    def queue_s(self) -> float | None:
        """From submission to admission."""
        return None if self.admitted_s is None else self.admitted_s - self.submitted_s

    @property
    def prefill_s(self) -> float | None:
        """From admission to the first token."""
        return None if self.first_token_s is None or self.admitted_s is None else self.first_token_s - self.admitted_s

    @property
    def first_token_after_s(self) -> float | None:
        """From submission to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.submitted_s

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        return (
            None if self.first_token_s is None or self.last_token_s is None else self.last_token_s - self.first_token_s
        )
