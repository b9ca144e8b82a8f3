"""The limits of a scheduler."""

from dataclasses import dataclass, fields

from llama_core.config import EngineConfig
from llama_core.model.operations import FULL_ATTENTION


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_batch_size: slots. max_step_tokens: tokens of one step. max_waiting and max_waiting_tokens: sequences that
    may wait and their tokens, None for any number. max_drafts: proposed tokens of one step, 0 for no speculation. window:
    positions that the model's widest layer attends to (`ModelConfig.longest_window`). max_loras: adapters that ranks hold."""

    max_batch_size: int
    max_step_tokens: int
    stop_ids: frozenset[int]
    max_waiting: int | None = None
    max_drafts: int = 0
    prefix_caching: bool = True
    max_waiting_tokens: int | None = None
    window: int = FULL_ATTENTION
    max_loras: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.max_batch_size <= self.max_step_tokens, "each running sequence has a row in a step"

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        stop_ids: frozenset[int],
        *,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
        window: int = FULL_ATTENTION,
    ) -> "SchedulerConfig":
        """Every attribute of `config` that has the name of a field, the limits of the queue, and the model's window."""
        own = {
            "stop_ids": stop_ids,
            "max_waiting": max_waiting,
            "max_waiting_tokens": max_waiting_tokens,
            "window": window,
        }
        same = {f.name: getattr(config, f.name) for f in fields(cls) if f.name not in own}
        return cls(**same, **own)  # type: ignore[arg-type]
