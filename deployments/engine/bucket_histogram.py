"""A histogram for values that come with every token: it counts them as they come, and writes the counts once a second."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final

import prometheus_client
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from ray.serve import metrics as ray_metrics

SERIES_A_CALL: Final = 64  # that one call publishes in Ray, which takes 10 us for each


class BucketHistogram(Collector):
    """Counts of values up to each bound, and their sum, with fixed `labels`.

    GET /metrics has a histogram. Ray has a gauge for each of its series, with the names that Prometheus gives them:
    Ray's histogram would take 10 us for each value.
    """

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        name: str,
        help_text: str,
        bounds: Sequence[float],
        labels: Mapping[str, str],
        *,
        in_ray: bool,
    ) -> None:
        self._name, self._help_text, self._labels = name, help_text, dict(labels)
        self._bounds = list(bounds)
        assert self._bounds == sorted(set(self._bounds))
        self._les = [*map(floatToGoString, self._bounds), "+Inf"]
        self._counts = [0] * len(self._les)
        self._sum = 0.0
        self._pending: list[tuple[ray_metrics.Gauge, float, dict[str, str]]] = []
        self._published_count = -1
        self._ray: tuple[ray_metrics.Gauge, ray_metrics.Gauge, ray_metrics.Gauge] | None = None
        if in_ray:
            keys = tuple(labels)
            self._ray = (
                ray_metrics.Gauge(f"{name}_bucket", help_text, (*keys, "le")),  # type: ignore[arg-type]
                ray_metrics.Gauge(f"{name}_sum", help_text, keys),  # type: ignore[arg-type]
                ray_metrics.Gauge(f"{name}_count", help_text, keys),  # type: ignore[arg-type]
            )
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help_text, labels=list(self._labels))
        buckets = list(zip(self._les, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family

    def publish(self, *, again: bool = False) -> bool:
        """Write changed counts to Ray; with `again`, unchanged ones too. Returns False if some are left for the next call."""
        if self._ray is None:
            return True
        if not self._pending:
            total = sum(self._counts)
            if total == self._published_count and not again:
                return True
            self._published_count = total
            bucket, sum_, count = self._ray
            self._pending = [(sum_, self._sum, self._labels), (count, float(total), self._labels)]
            for le, number in zip(self._les, accumulate(self._counts), strict=True):
                self._pending.append((bucket, float(number), {**self._labels, "le": le}))
        now, self._pending = self._pending[:SERIES_A_CALL], self._pending[SERIES_A_CALL:]
        for gauge, value, labels in now:
            gauge.set(value, labels)
        return not self._pending
