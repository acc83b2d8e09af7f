"""A query of another engine, in a process with an environment of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.kafka import Kafka
from spark_jobs.session.java import choose_java_home

#: Sides of other environments, by the module that is run there.
PEERS = {"spark-realtime": "benchmarks.peers.spark_realtime", "flink": "benchmarks.peers.flink_sql"}
#: Seconds without a result after which all events are taken for counted, and for the end of a process.
_QUIET_S = 5.0
_END_S = 20.0


class PeerQuery:
    """A query that reads a topic and writes its results into another one."""

    def __init__(
        self, interpreter: Path, side: str, workload: str, kafka: Kafka, source: str, sink: str, folder: Path
    ) -> None:
        self._kafka, self._sink = kafka, sink
        self._results, self._since = 0, time.monotonic()
        folder.mkdir(parents=True)
        self._log = folder / "log"
        command = [interpreter, "-m", PEERS[side], workload, kafka.address, source, sink, folder / "checkpoint"]
        environment = {**os.environ, "JAVA_HOME": str(choose_java_home(os.environ))}
        with self._log.open("wb") as log:
            # A session of its own: the Java that it starts ends with it.
            self._process = subprocess.Popen(
                [str(word) for word in command], cwd=Path(__file__).parents[2], env=environment, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def ended(self, within_s: float) -> bool:
        """Return False after some seconds; raise ChildProcessError if it ends before, which no query does by itself."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        raise ChildProcessError(f"it ended with code {code}: {self._log.read_text(errors='replace')[-2000:]}")

    def counted_all(self) -> bool:
        """Return whether there are results, and none came for some seconds."""
        results = sum(self._kafka.ends(self._sink).values())
        if results != self._results:
            self._results, self._since = results, time.monotonic()
        return results > 0 and time.monotonic() - self._since > _QUIET_S

    def stop(self) -> None:
        """End its processes, of which Java may outlive Python, and wait until none uses the cores of the next side."""
        deadline = time.monotonic() + _END_S
        # None of the group is left.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            while time.monotonic() < deadline:
                self._process.poll()
                os.killpg(self._process.pid, 0)
                time.sleep(0.1)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
