"""Whether the batches of a fleet are traced: where the environment variables of OpenTelemetry name a collector."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from coordinator.model.errors import SetupError
from coordinator.runtime.extras import import_extra
from coordinator.telemetry.batch_spans import TracedBatch

if TYPE_CHECKING:
    from coordinator.service.trace_export import TraceExport

log = logging.getLogger(__name__)


def is_configured(environ: Mapping[str, str]) -> bool:
    """Return whether the variables name a collector of spans, and none of them turns spans off."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return bool(endpoint) and environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"


def open_traces(uri: str) -> TraceExport | None:
    """Return the export of a fleet's spans; None if it is not configured, or cannot be had, which is logged."""
    if not is_configured(os.environ):
        return None
    try:
        export: TraceExport = import_extra("coordinator.service.trace_export").TraceExport(uri)
    except SetupError as error:
        log.warning("batches are not traced: %s", error)
    except Exception:  # a variable has a value that the exporter does not accept: batches go on without traces
        log.exception("batches are not traced: OpenTelemetry's exporter does not start")
    else:
        return export
    return None


async def keep_tracing(export: TraceExport, next_batch: Callable[[], Awaitable[TracedBatch]]) -> None:
    """Send the spans of batches that have ended, again and again, beside the answers of an asynchronous actor."""
    while True:
        try:
            await asyncio.to_thread(export.send, await next_batch())
        except Exception:  # callers of the actor do without traces
            log.exception("a batch could not be traced")
