"""A collector in this process: an HTTP server that keeps the spans of OpenTelemetry and the events of OpenLineage that come."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.clocks import until


class Collector:
    """What was sent.

    Attributes
    ----------
    status
        What is answered; requests that are not answered by 200 are not kept.
    delay_s
        How long each answer takes.
    requests
        How many requests came, kept or not.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.status, self.delay_s, self.requests = 200, 0.0, 0
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def take(self, path: str, body: bytes) -> int:
        self.requests += 1
        time.sleep(self.delay_s)
        if self.status == 200 and path.endswith("/v1/traces"):
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                self.resources.append(attributes(resource.resource))
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        elif self.status == 200:
            self.events.append(json.loads(body))
        return self.status

    def wait_for_spans(self, count: int) -> list[Span]:
        """Return the spans once there are so many."""
        until(lambda: len(self.spans) >= count, 30, lambda: f"{len(self.spans)} spans")
        assert len(self.spans) == count
        return self.spans

    def wait_for_event(self, kind: str, job: str) -> dict[str, Any]:
        """Return the newest event of a kind and job."""
        until(lambda: bool(self.of(kind, job)), 30, lambda: f"{[(e['eventType'], e['job']) for e in self.events]}")
        return self.of(kind, job)[-1]

    def of(self, kind: str, job: str) -> list[dict[str, Any]]:
        """Return the events of a kind and job."""
        return [event for event in self.events if (event["eventType"], event["job"]["name"]) == (kind, job)]


def attributes(described: Any) -> dict[str, Any]:
    """Return the attributes of a span or resource."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in described.attributes}


def below(spans: list[Span], parent: Span) -> list[Span]:
    """Return the spans right below one."""
    return [span for span in spans if span.parent_span_id == parent.span_id]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Serve a collector on a free port of the loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            try:
                self.send_response(collector.take(self.path, body))
                self.send_header("Content-Length", "0")
                self.end_headers()
            except ConnectionError:
                pass  # the sender did not wait for the answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield collector
    server.shutdown()
    server.server_close()
    thread.join()
