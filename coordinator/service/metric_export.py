"""Samples of a process as metrics of Ray, which each node's Ray exports for Prometheus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from coordinator.model.metric_table import BATCH_BUCKETS_S, FLEET, Kind, Metric, Sample, metric_of
from coordinator.model.names import fleet_id_of

log = logging.getLogger(__name__)

#: Seconds between two exports. Ray collects about every ten seconds, and forgets gauges that were not set since.
EXPORT_INTERVAL_S = 4.0


class MetricExport:
    """Exports the samples of one process of a fleet to Ray."""

    def __init__(self, uri: str) -> None:
        self._fleet = fleet_id_of(uri)
        #: Counters as they were exported last: Ray wants differences only.
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}
        self._instruments: dict[str, Any] = {}

    def send(self, samples: Iterable[Sample]) -> None:
        """Export all samples of the process as they are now; of histograms, the values since the last export."""
        for sample in samples:
            metric = metric_of(sample.name)
            tags = {FLEET: self._fleet, **dict(zip(metric.labels, sample.labels, strict=True))}
            instrument = self._instrument(metric)
            match metric.kind:
                case Kind.GAUGE:
                    instrument.set(sample.value, tags=tags)
                case Kind.HISTOGRAM:
                    instrument.observe(sample.value, tags=tags)
                case Kind.COUNTER:
                    increment = self.increase(sample)
                    if increment > 0:
                        instrument.inc(increment, tags=tags)

    def increase(self, sample: Sample) -> float:
        """Return the increase of a counter since the last call. A counter that is less than it was has begun again at 0."""
        key = sample.name, sample.labels
        previous = self._last.get(key, 0)
        self._last[key] = sample.value
        return sample.value - previous if sample.value >= previous else sample.value

    def _instrument(self, metric: Metric) -> Any:
        instrument = self._instruments.get(metric.name)
        if instrument is None:
            labels = (FLEET, *metric.labels)
            match metric.kind:
                case Kind.COUNTER:
                    instrument = Counter(metric.name, metric.meaning, labels)
                case Kind.GAUGE:
                    instrument = Gauge(metric.name, metric.meaning, labels)
                case Kind.HISTOGRAM:
                    instrument = Histogram(metric.name, metric.meaning, list(BATCH_BUCKETS_S), labels)
            self._instruments[metric.name] = instrument
        return instrument


async def keep_exporting(uri: str, samples: Callable[[], Awaitable[Iterable[Sample]]]) -> None:
    """Export the samples of an asynchronous actor to Ray, again and again."""
    export = MetricExport(uri)
    while True:
        try:
            export.send(await samples())
        except Exception:  # callers of the actor do without metrics
            log.exception("metrics could not be exported; it is tried again")
        await asyncio.sleep(EXPORT_INTERVAL_S)
