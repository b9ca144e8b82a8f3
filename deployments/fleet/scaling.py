"""Serve's autoscaling of engines. Their requests come from fronts, not through Serve, so Serve's own count of requests is 0."""

import math
from typing import Any, Final

from ray.serve.config import AutoscalingContext

SEQUENCES: Final = "sequences"  # in the statistics of `LlamaEngine.record_autoscaling_stats`: those that run or wait


def by_sequences(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """So many engines that each has `target_ongoing_requests` sequences, and no fewer than now while an engine has not told
    its own. Serve applies its delays and limits afterwards."""
    sequences = (context.aggregated_metrics or {}).get(SEQUENCES, {})
    target: float = context.config.target_ongoing_requests  # type: ignore[union-attr]
    least = context.current_num_replicas if len(sequences) < context.current_num_replicas else 0
    return max(least, math.ceil(sum(sequences.values()) / target)), {}
