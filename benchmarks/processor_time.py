"""Processor time of the sides of a benchmark: seconds of a core in a batch, by process and by stage of Spark's."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from pyspark.sql import SparkSession

__all__ = ["ProcessorTimes"]

#: What is in the command of a process, and what the process is called here; the first that fits counts.
_KINDS = (
    ("ray::StoreActor", "store actors"),
    ("ray::Coordinator", "coordinator"),
    ("org.apache.spark.deploy.SparkSubmit", "driver, JVM"),
    ("io.ray.runtime.runner.worker", "executor, JVM"),
    # Among Spark's settings in the driver's command, too.
    ("statefleet.worker_daemon", "Python workers"),
)
_OTHERS = "Ray and others"


class ProcessorTimes:
    """Processor time of the batches of each side, of all processes of this machine; nothing else should run on it."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._seen: set[int] = set()
        #: By side: a batch's seconds by process; and by stage, in their order.
        self._processes: dict[str, list[dict[str, float]]] = defaultdict(list)
        self._stages: dict[str, list[list[float]]] = defaultdict(list)

    @contextmanager
    def of(self, side: str) -> Iterator[None]:
        """Count what is used meanwhile as a batch of a side."""
        self._new_stages()
        before = _by_process()
        yield
        after, used = _by_process(), defaultdict[str, float](float)
        for pid, (kind, seconds) in after.items():
            used[kind] += seconds - before.get(pid, (kind, 0.0))[1]
        self._processes[side].append(used)
        self._stages[side].append(self._new_stages())

    def _new_stages(self) -> list[float]:
        """Return the processor seconds of the stages that were not there before, in their order."""
        context: Any = self._spark.sparkContext._jsc.sc()
        jvm: Any = self._spark.sparkContext._jvm
        no_quantiles = self._spark.sparkContext._gateway.new_array(jvm.double, 0)
        stages = context.statusStore().stageList(None, False, False, no_quantiles, jvm.java.util.ArrayList())
        new = {stage.stageId(): stage.executorCpuTime() / 1e9 for stage in map(stages.apply, range(stages.size()))}
        new = {number: seconds for number, seconds in sorted(new.items()) if number not in self._seen}
        self._seen |= new.keys()
        return list(new.values())

    def report(self) -> str:
        """Return a table of the sides' medians."""
        lines = []
        for side, batches in self._processes.items():
            total = statistics.median(sum(batch.values()) for batch in batches)
            kinds = {kind: statistics.median(batch.get(kind, 0.0) for batch in batches) for kind in _names()}
            stages = [statistics.median(of_stage) for of_stage in zip(*self._stages[side], strict=False)]
            used = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in kinds.items() if seconds >= 0.005)
            lines.append(f"  {side}: {total:.2f} s of a core a batch: {used}")
            lines.append(f"    of it in Spark's stages: {', '.join(f'{seconds:.3f}' for seconds in stages)}")
        return "\n".join(lines)


def _names() -> list[str]:
    return ["driver, Python", *(name for _, name in _KINDS), _OTHERS]


def _by_process() -> dict[int, tuple[str, float]]:
    """Return what each process is called, and its processor seconds."""
    times = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            used = process.cpu_times()
            times[process.pid] = _kind(process), used.user + used.system
    return times


def _kind(process: psutil.Process) -> str:
    if process.pid == os.getpid():
        return "driver, Python"
    command = " ".join(process.cmdline())
    return next((name for text, name in _KINDS if text in command), _OTHERS)
