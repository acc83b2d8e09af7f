"""QueryLineage of this driver's queries, by OpenLineage's client; imported only where it is sent."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import dataset_version_dataset, error_message_run, job_type_job

from spark_jobs.driver.datasets import DatasetName, input_datasets, output_datasets, without_password

log = logging.getLogger(__name__)

#: Seconds between two events with new versions of the states of a run.
_BETWEEN_S = 60.0
#: Events that wait for the collector; further ones are dropped.
_WAITING = 100
#: Seconds that the end of the program waits for Spark to say how runs ended, and then for the collector.
_END_S = 1.0
_LAST_EVENTS_S = 3.0
_PRODUCER = "urn:statefleet"


@dataclass(slots=True)
class _Run:
    """A run of a query, by Spark's ids."""

    run_id: str
    query_id: str
    name: str | None
    kafka: Sequence[Mapping[str, str | None]] = ()
    #: By fleet and name, the newest version that Spark has finished; 0 before the first one. Empty for a query without our states.
    states: dict[tuple[str, str], int] = field(default_factory=dict)
    inputs: Sequence[DatasetName] = ()
    outputs: Sequence[DatasetName] = ()
    sent_s: float = -math.inf

    @property
    def job(self) -> Job:
        """The query, by its name, or that of its last operator's state, which Spark plans first."""
        fleet, state = next(iter(self.states))
        kind = job_type_job.JobTypeJobFacet(processingType="STREAMING", integration="SPARK", jobType="QUERY")
        return Job(os.environ.get("OPENLINEAGE_NAMESPACE") or fleet, self.name or state, {"jobType": kind})


class QueryLineage:
    """Sends what happens to the runs of queries that have states in a fleet, from a thread of its own: nothing waits for it."""

    def __init__(self, client: OpenLineageClient) -> None:
        self._client = client
        self._guard = threading.Lock()
        self._runs: dict[str, _Run] = {}
        self._events: queue.Queue[RunEvent] = queue.Queue(_WAITING)
        threading.Thread(target=self._send, name="statefleet-lineage", daemon=True).start()
        atexit.register(self.close)

    @classmethod
    def connected(cls) -> QueryLineage:
        """Return what sends to where OpenLineage's own configuration says."""
        return cls(OpenLineageClient())

    def take(self, message: Mapping[str, Any]) -> None:
        """Take in a message about a query; it never raises, as a query is worth more than its lineage.

        The driver is ``asked`` (:meth:`~spark_jobs.driver.driver_calls.DriverCalls.answer`) ``query_started``, ``begin``,
        ``query_progress`` or ``query_ended``.
        """
        try:
            with self._guard:
                match message["asked"]:
                    case "query_started":
                        run = _Run(message["run_id"], message["query_id"], message["name"])
                        self._runs[run.run_id] = run
                    case "begin":
                        self._begin(message)
                    case "query_progress":
                        self._progress(json.loads(message["progress"]))
                    case "query_ended":
                        self._end(message["run_id"], message["error"])
        except Exception:
            log.exception("an event of lineage could not be made")

    def _begin(self, batch: Mapping[str, Any]) -> None:
        # The run of a continuous query has an id of its own here.
        run = next((run for run in reversed(self._runs.values()) if run.query_id == batch["query_id"]), None)
        if run is None:
            return  # it was started before it was followed
        is_first = not run.states
        run.states.setdefault((batch["operator"]["uri"], batch["operator"]["state"]), 0)
        run.kafka = batch["kafka"]
        if is_first:
            self._emit(RunState.START, run)

    def _progress(self, progress: Mapping[str, Any]) -> None:
        run = self._runs.get(progress["runId"])
        if run is None or not run.states:
            return
        run.states = dict.fromkeys(run.states, progress["batchId"] + 1)
        found = (input_datasets(source["description"], run.kafka) for source in progress["sources"])
        run.inputs = list(dict.fromkeys(dataset for datasets in found for dataset in datasets))
        run.outputs = output_datasets(progress["sink"]["description"], run.kafka)
        if time.monotonic() - run.sent_s >= _BETWEEN_S:
            run.sent_s = time.monotonic()
            self._emit(RunState.RUNNING, run)

    def _end(self, run_id: str, error: str | None) -> None:
        run = self._runs.pop(run_id, None)
        if run is not None and run.states:
            self._emit(RunState.COMPLETE if error is None else RunState.FAIL, run, error)

    def _emit(self, kind: RunState, run: _Run, error: str | None = None) -> None:
        facets: dict[str, Any] = {}
        if error is not None:
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
                without_password(error.partition("\n")[0]), "JAVA"
            )
        event = RunEvent(
            eventTime=datetime.now(UTC).isoformat(),
            producer=_PRODUCER,
            eventType=kind,
            run=Run(run.run_id, facets),
            job=run.job,
            inputs=[InputDataset(*dataset) for dataset in run.inputs],
            outputs=[*(OutputDataset(*dataset) for dataset in run.outputs), *_states(run.states.items())],
        )
        try:
            self._events.put_nowait(event)
        except queue.Full:
            log.warning("an event of lineage is dropped, as %d others wait for the collector", _WAITING)

    def _send(self) -> None:
        while True:
            event = self._events.get()
            try:
                self._client.emit(event)
            except Exception as error:  # noqa: BLE001 - of any transport: the next event is sent all the same
                reason = f"{type(error).__name__}: {without_password(str(error))}"
                log.warning("an event of lineage could not be sent: %s", reason)
            finally:
                self._events.task_done()

    def close(self) -> None:
        """End the runs that the program leaves, and wait a moment for the last events to be sent."""
        atexit.unregister(self.close)
        _wait(_END_S, lambda: not any(run.states for run in list(self._runs.values())))
        with self._guard:
            for run in self._runs.values():
                if run.states:
                    self._emit(RunState.ABORT, run)
            self._runs.clear()
        _wait(_LAST_EVENTS_S, lambda: not self._events.unfinished_tasks)
        self._client.close(_END_S)


def _states(versions: Iterable[tuple[tuple[str, str], int]]) -> list[OutputDataset]:
    return [
        OutputDataset(
            fleet,
            state,
            facets={"version": dataset_version_dataset.DatasetVersionDatasetFacet(str(version))} if version else {},
        )
        for (fleet, state), version in versions
    ]


def _wait(within_s: float, is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + within_s
    while not is_so() and time.monotonic() < until_s:
        time.sleep(0.02)
