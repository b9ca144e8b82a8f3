"""One metric, recorded in two places: for GET /metrics of this replica, and in Ray's metrics.

Recording is cheap, because every step records; `publish` writes the values once a second.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import prometheus_client
from prometheus_client.core import UnknownMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from ray.serve import metrics as ray_metrics

BATCH_SIZE = 64  # values of a histogram that one call publishes: Ray takes 10 us for one, and streams must not wait
MAX_UNPUBLISHED = 100_000

Labels = tuple[tuple[str, str], ...]

# Otherwise each counter and histogram has a second series, which the text format calls a gauge.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


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
        self._register(registry, name, help_text, labels)
        self._ray: ray_metrics.Gauge | None = None
        if in_ray:
            self._ray = ray_metrics.Gauge(name, help_text, labels)  # type: ignore[arg-type]

    def _register(
        self, registry: prometheus_client.CollectorRegistry, name: str, help_text: str, labels: tuple[str, ...]
    ) -> None:
        self._local: prometheus_client.Gauge = prometheus_client.Gauge(name, help_text, labels, registry=registry)

    def _write(self, labels: dict[str, str], value: float, last: float) -> None:
        """Write a value that differs from the `last` one for GET /metrics."""
        (self._local.labels(**labels) if labels else self._local).set(value)

    def set(self, value: float, **labels: str) -> None:
        self._values[tuple(labels.items())] = value

    def publish(self, *, again: bool = False) -> bool:
        """Write changed values to both places; with `again`, unchanged ones too. Returns True: nothing is left to write."""
        for key, value in self._values.items():
            is_new = self._published.get(key) != value
            if not is_new and not again:
                continue
            labels = dict(key)
            if is_new:
                self._write(labels, value, self._published.get(key, 0.0))
                self._published[key] = value
            if self._ray is not None:
                self._ray.set(value, labels)
        return True


class Count(Gauge):
    """A value that only grows. It starts at 0, for every combination of `known` label values too, so that an alert has a
    baseline.

    GET /metrics has a counter, whose name ends in "_total". Ray has a gauge: its counters take no value of 0.
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

    def _register(
        self, registry: prometheus_client.CollectorRegistry, name: str, help_text: str, labels: tuple[str, ...]
    ) -> None:
        assert name.endswith("_total"), "Prometheus's counters end so"
        self._counter = prometheus_client.Counter(name, help_text, labels, registry=registry)

    def _write(self, labels: dict[str, str], value: float, last: float) -> None:
        (self._counter.labels(**labels) if labels else self._counter).inc(value - last)

    def add(self, value: float = 1, **labels: str) -> None:
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0.0) + value

    def rise_to(self, value: float, **labels: str) -> None:
        """Take a total that is counted elsewhere."""
        assert value >= self._values.get(tuple(labels.items()), 0.0), "a count only grows"
        self.set(value, **labels)


class RenamedCount(Count):
    """A count without labels that is also recorded under another name: that of the last release, or of Meta's reference."""

    def __init__(
        self, registry: prometheus_client.CollectorRegistry, name: str, help_text: str, old_name: str, *, in_ray: bool
    ) -> None:
        super().__init__(registry, name, help_text, in_ray=in_ray)
        self._alias = _Alias(registry, old_name, f"The same as {name}", in_ray=in_ray)

    def publish(self, *, again: bool = False) -> bool:
        self._alias.set(self._values[()])
        self._alias.publish(again=again)
        return super().publish(again=again)


class _Alias(Gauge, Collector):
    """A count under a name that does not end in "_total". GET /metrics has it untyped, which lets a name end in "_count"."""

    def _register(
        self, registry: prometheus_client.CollectorRegistry, name: str, help_text: str, labels: tuple[str, ...]
    ) -> None:
        assert not labels, "only counts without labels were renamed"
        self._name, self._help_text = name, help_text
        self._values[()] = self._published_value = 0.0
        registry.register(self)

    def _write(self, labels: dict[str, str], value: float, last: float) -> None:
        self._published_value = value

    def collect(self) -> Iterable[Metric]:
        yield UnknownMetricFamily(self._name, self._help_text, self._published_value)


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
