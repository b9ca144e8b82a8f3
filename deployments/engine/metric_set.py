"""The metrics of one registry: makes each in both of its places, and publishes all."""

from collections.abc import Mapping, Sequence

import prometheus_client

from deployments.engine.bucket_histogram import BucketHistogram
from deployments.engine.metric import Count, Gauge, Histogram, RenamedCount


class MetricSet:
    """`registry` is what GET /metrics writes. in_ray: record in Ray's metrics too."""

    def __init__(self, *, in_ray: bool) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.all: list[Gauge | Histogram | BucketHistogram] = []
        self._in_ray = in_ray

    def gauge(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Gauge:
        gauge = Gauge(self.registry, name, help_text, labels, in_ray=self._in_ray)
        self.all.append(gauge)
        return gauge

    def count(self, name: str, help_text: str, known: Mapping[str, Sequence[str]] | None = None) -> Count:
        count = Count(self.registry, name, help_text, known, in_ray=self._in_ray)
        self.all.append(count)
        return count

    def renamed(self, name: str, help_text: str, old_name: str) -> Count:
        count = RenamedCount(self.registry, name, help_text, old_name, in_ray=self._in_ray)
        self.all.append(count)
        return count

    def histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(self.registry, name, help_text, buckets, in_ray=self._in_ray)
        self.all.append(histogram)
        return histogram

    def bucket_histogram(
        self, name: str, help_text: str, bounds: Sequence[float], labels: Mapping[str, str]
    ) -> BucketHistogram:
        histogram = BucketHistogram(self.registry, name, help_text, bounds, labels, in_ray=self._in_ray)
        self.all.append(histogram)
        return histogram

    def render(self) -> bytes:
        """Prometheus text of what has been recorded."""
        for metric in self.all:
            while not metric.publish():
                pass
        return prometheus_client.generate_latest(self.registry)
