"""Metrics in Prometheus' text form. Each server has its own registry, so one process may hold several."""

import re
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
_EACH = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Counters and histograms of requests, and the engine's own figures as gauges `axl_engine_*`."""

    def __init__(self, engine_stats: Callable[[], Mapping[str, float]]):
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter("axl_requests", "Requests answered", ["endpoint", "status"], registry=r)
        self.prompt_tokens = Counter("axl_prompt_tokens", "Tokens of prompts accepted", registry=r)
        self.generated_tokens = Counter("axl_generated_tokens", "Tokens generated, stop tokens included", registry=r)
        self.waiting = Gauge("axl_requests_waiting", "Requests without a first token", registry=r)
        self.running = Gauge("axl_requests_running", "Requests with a first token, not yet answered", registry=r)
        self.first_token = Histogram(
            "axl_time_to_first_token_seconds", "From the request to its first token", buckets=_FIRST, registry=r
        )
        self.each_token = Histogram(
            "axl_time_per_token_seconds", "Per token after the first to come", buckets=_EACH, registry=r
        )
        r.register(_EngineFigures(engine_stats))

    def text(self) -> bytes:
        """Return all of them in Prometheus' text form."""
        return generate_latest(self.registry)


class _EngineFigures:
    """The engine's latest figures, read when Prometheus asks."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]):
        self._stats = stats

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in sorted(self._stats().items()):
            word = re.sub(r"\W", "_", name)
            yield GaugeMetricFamily(f"axl_engine_{word}", f"The engine's {name.replace('_', ' ')}", value=value)

    def describe(self) -> list[GaugeMetricFamily]:
        return []
