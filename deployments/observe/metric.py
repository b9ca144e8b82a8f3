"""One metric, recorded in two places: for GET /metrics of this replica, and in Ray's metrics.

Recording is cheap, because every step and every token records; `publish` writes the values to Ray once a second.
"""

import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString
from ray.serve import metrics as ray_metrics

SERIES_A_CALL = 64  # of a histogram that one call publishes in Ray, which takes 10 us for each

Labels = tuple[tuple[str, str], ...]


class Gauge(Collector):
    """A value that rises and falls. Not safe across threads: a replica has one event loop.

    GET /metrics has a counter where the name ends in "_total", as a counter's must, else a gauge.
    """

    def __init__(self, metrics: "MetricSet", name: str, help_text: str, labels: tuple[str, ...] = ()) -> None:
        self.name, self._help_text, self._constant = metrics.prefix + name, help_text, metrics.labels
        self._keys = (*self._constant, *labels)
        self._values: dict[Labels, float] = {}
        self._published: dict[Labels, float] = {}
        self._ray: ray_metrics.Gauge | None = None
        if metrics.in_ray:
            self._ray = ray_metrics.Gauge(self.name, help_text, self._keys)  # type: ignore[arg-type]
        metrics.registry.register(self)

    def set(self, value: float, **labels: str) -> None:
        self._values[tuple(labels.items())] = value

    def retain(self, label: str, values: Collection[str]) -> None:
        """Forget the series with other values of this label."""
        for key in [key for key in self._values if dict(key)[label] not in values]:
            del self._values[key]
            self._published.pop(key, None)

    def collect(self) -> Iterable[Metric]:
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        family = kind(self.name, self._help_text, labels=self._keys)
        for key, value in self._values.items():
            labels = {**self._constant, **dict(key)}
            family.add_metric([labels[name] for name in self._keys], value)
        yield family

    def publish(self, *, again: bool = False) -> bool:
        """Write changed values to Ray; with `again`, unchanged ones too. Returns True: nothing is left to write."""
        if self._ray is not None:
            for key, value in self._values.items():
                if again or self._published.get(key) != value:
                    self._published[key] = value
                    self._ray.set(value, {**self._constant, **dict(key)})
        return True


class Count(Gauge):
    """A value that only grows. It starts at 0, for every combination of `known` label values too, so that an alert has a
    baseline. Ray has a gauge: its counters take no value of 0.
    """

    def __init__(
        self, metrics: "MetricSet", name: str, help_text: str, known: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        known = known or {}
        super().__init__(metrics, name, help_text, tuple(known))
        for values in itertools.product(*known.values()):
            self._values[tuple(zip(known, values, strict=True))] = 0.0

    def add(self, value: float = 1, **labels: str) -> None:
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0.0) + value

    def rise_to(self, value: float) -> None:
        """Take a total that is counted elsewhere. A lower one, as of engines of which some have left, changes nothing."""
        self.set(max(value, self._values[()]))


class Histogram(Collector):
    """Counts of values up to each bound, and their sum.

    GET /metrics has a histogram. Ray has a gauge for each of its series, with the names that Prometheus gives them:
    Ray's histogram would take 10 us for each value.
    """

    def __init__(self, metrics: "MetricSet", name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name, self._help_text, self._labels = metrics.prefix + name, help_text, metrics.labels
        self._bounds = list(bounds)
        assert self._bounds == sorted(set(self._bounds))
        self._les = [*map(floatToGoString, self._bounds), "+Inf"]
        self._counts = [0] * len(self._les)
        self._sum = 0.0
        self._pending: list[tuple[ray_metrics.Gauge, float, dict[str, str]]] = []
        self._published_count = -1
        self._ray: tuple[ray_metrics.Gauge, ray_metrics.Gauge, ray_metrics.Gauge] | None = None
        if metrics.in_ray:
            keys = tuple(self._labels)
            self._ray = (
                ray_metrics.Gauge(f"{self.name}_bucket", help_text, (*keys, "le")),  # type: ignore[arg-type]
                ray_metrics.Gauge(f"{self.name}_sum", help_text, keys),  # type: ignore[arg-type]
                ray_metrics.Gauge(f"{self.name}_count", help_text, keys),  # type: ignore[arg-type]
            )
        metrics.registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self.name, self._help_text, labels=list(self._labels))
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


class MetricSet:
    """Makes metrics with one prefix and `labels`. registry: what GET /metrics writes. in_ray: record in Ray's metrics too."""

    def __init__(self, registry: CollectorRegistry, prefix: str, labels: dict[str, str], *, in_ray: bool) -> None:
        self.registry, self.prefix, self.labels, self.in_ray = registry, prefix, labels, in_ray
        self.all: list[Gauge | Histogram] = []

    def gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        self.all.append(gauge := Gauge(self, name, help_text, labels))
        return gauge

    def count(self, name: str, help_text: str, known: Mapping[str, Sequence[str]] | None = None) -> Count:
        self.all.append(count := Count(self, name, help_text, known))
        return count

    def histogram(self, name: str, help_text: str, bounds: Sequence[float]) -> Histogram:
        self.all.append(histogram := Histogram(self, name, help_text, bounds))
        return histogram
