"""Serve's autoscaling of engines. Their requests come from fronts, not through Serve, so Serve's own count of requests is 0."""

import math
from typing import Any, Final

from ray.serve.config import AutoscalingContext

SEQUENCES: Final = "sequences"  # in the statistics of `LlamaEngine.record_autoscaling_stats`: those that run or wait


def by_sequences(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """So many engines that each has `target_ongoing_requests` sequences. Serve applies its delays and limits afterwards."""
    total = sum((context.aggregated_metrics or {}).get(SEQUENCES, {}).values())
    target: float = context.config.target_ongoing_requests  # type: ignore[union-attr]
    return math.ceil(total / target), {}
