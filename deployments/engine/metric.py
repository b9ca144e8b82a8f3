"""One metric, recorded in two places: for GET /metrics of this replica, and in Ray's metrics.

Recording is cheap, because every step records; `publish` writes the values once a second.
"""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import prometheus_client
from ray.serve import metrics as ray_metrics

BATCH_SIZE = 64  # values of a histogram that one call publishes: Ray takes 10 us for one, and streams must not wait
MAX_UNPUBLISHED = 100_000

Labels = tuple[tuple[str, str], ...]


class Gauge:
    """A value that rises and falls. Not safe across threads: a replica has one event loop."""

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        name: str,
        help_text: str,
        labels: tuple[str, ...] = (),
        *,
        in_ray: bool,
    ) -> None:
        self._values: dict[Labels, float] = {}
        self._published: dict[Labels, float] = {}
        self._local = prometheus_client.Gauge(name, help_text, labels, registry=registry)
        self._ray: ray_metrics.Gauge | None = None
        if in_ray:
            self._ray = ray_metrics.Gauge(name, help_text, labels)  # type: ignore[arg-type]

    def set(self, value: float, **labels: str) -> None:
        self._values[tuple(labels.items())] = value

    def publish(self, *, again: bool = False) -> bool:
        """Write changed values to both places, and unchanged ones `again`. Returns True: nothing is left to write."""
        for key, value in self._values.items():
            is_new = self._published.get(key) != value
            if not is_new and not again:
                continue
            labels = dict(key)
            if is_new:
                self._published[key] = value
                (self._local.labels(**labels) if labels else self._local).set(value)
            if self._ray is not None:
                self._ray.set(value, labels)
        return True


class Count(Gauge):
    """A value that only grows. It starts at 0, for every combination of `known` label values too, so that an alert has a
    baseline.

    Both places hold it as a gauge: Ray's counters take no value of 0, and Prometheus's would rename a count that does not end
    in "_total".
    """

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        name: str,
        help_text: str,
        known: Mapping[str, Sequence[str]] | None = None,
        *,
        in_ray: bool,
    ) -> None:
        labels = known or {}
        super().__init__(registry, name, help_text, tuple(labels), in_ray=in_ray)
        for values in itertools.product(*labels.values()):
            self._values[tuple(zip(labels, values, strict=True))] = 0.0

    def add(self, value: float = 1, **labels: str) -> None:
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0.0) + value


class RenamedCount(Count):
    """A count that is also recorded under the name that it had in the last release."""

    def __init__(
        self, registry: prometheus_client.CollectorRegistry, name: str, help_text: str, old_name: str, *, in_ray: bool
    ) -> None:
        super().__init__(registry, name, help_text, in_ray=in_ray)
        self._alias = Count(registry, old_name, f"Renamed to {name}", in_ray=in_ray)

    def publish(self, *, again: bool = False) -> bool:
        self._alias._values = self._values
        self._alias.publish(again=again)
        return super().publish(again=again)


class Histogram:
    """Values counted in buckets."""

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        name: str,
        help_text: str,
        buckets: tuple[float, ...],
        *,
        in_ray: bool,
    ) -> None:
        self._unpublished: deque[float] = deque(maxlen=MAX_UNPUBLISHED)
        self._local = prometheus_client.Histogram(name, help_text, registry=registry, buckets=buckets)
        self._ray: ray_metrics.Histogram | None = None
        if in_ray:
            self._ray = ray_metrics.Histogram(name, help_text, list(buckets))

    def observe(self, value: float) -> None:
        self._unpublished.append(value)

    def publish(self, *, again: bool = False) -> bool:
        """Write up to `BATCH_SIZE` values to both places. False if more are left for the next call."""
        for _ in range(min(len(self._unpublished), BATCH_SIZE)):
            value = self._unpublished.popleft()
            self._local.observe(value)
            if self._ray is not None:
                self._ray.observe(value)
        return not self._unpublished
