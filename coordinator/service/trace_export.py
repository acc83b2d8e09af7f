"""Spans of batches, by the SDK of OpenTelemetry; imported only where they are sent."""

from __future__ import annotations

import logging

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import set_span_in_context

from coordinator.model.names import fleet_id_of
from coordinator.telemetry.batch_spans import Span, TracedBatch, batch_span, trace_id

#: Seconds between two lines of the exporter's own log.
_BETWEEN_LINES_S = 60.0


class _Seldom(logging.Filter):
    """Passes a line now and then: a collector that is down would make one every two seconds."""

    last_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        passes = record.created - self.last_s >= _BETWEEN_LINES_S
        self.last_s = record.created if passes else self.last_s
        return passes


class _BatchIds(RandomIdGenerator):
    """Ids of spans by chance, and of traces by their batch."""

    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id


class TraceExport:
    """Sends the spans of a fleet to a collector, from a thread of the SDK's; it logs and drops those that it cannot send."""

    def __init__(self, uri: str) -> None:
        # The SDK's warnings as lines like the others of this process.
        sdk, ours = logging.getLogger("opentelemetry"), logging.getLogger("coordinator")
        sdk.handlers, sdk.propagate = ours.handlers, ours.propagate
        logging.getLogger(OTLPSpanExporter.__module__).filters = [_Seldom()]
        self._ids = _BatchIds()
        fleet = Resource({SERVICE_NAME: "statefleet", "statefleet.fleet": fleet_id_of(uri), "statefleet.uri": uri})
        # A name of the service in the environment replaces this one. The end of the process does not wait for the collector.
        provider = TracerProvider(
            resource=fleet.merge(OTELResourceDetector().detect()), id_generator=self._ids, shutdown_on_exit=False
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = provider.get_tracer("statefleet")

    def send(self, batch: TracedBatch) -> None:
        """Hand the spans of a batch to the SDK's thread, which never makes this wait."""
        self._ids.trace_id = trace_id(batch)
        self._send(batch_span(batch), Context())

    def _send(self, span: Span, context: Context) -> None:
        sent = self._tracer.start_span(
            span.name, context, attributes=dict(span.attributes), start_time=_ns(span.begin_ms)
        )
        # A sampler of the environment may leave a batch out.
        if sent.is_recording():
            inner = set_span_in_context(sent, context)
            for child in span.children:
                self._send(child, inner)
            sent.end(_ns(span.end_ms))


def _ns(ms: int) -> int:
    return ms * 1_000_000
