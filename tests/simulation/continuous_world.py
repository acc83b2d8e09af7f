"""A schedule of a continuous query: the world of the others, with connections, tasks that go on, and epochs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from store_actors.epochs import shard as epoch_shard
from store_actors.epochs.runs import EpochRuns
from tests.simulation.called import CalledStream
from tests.simulation.callers import Caller, FunctionHost
from tests.simulation.cluster import Life
from tests.simulation.continuous import ContinuousDriver
from tests.simulation.epoch_tasks import EpochTask
from tests.simulation.event_time import TimedStream, WindowedStream
from tests.simulation.first_rows import FirstStream
from tests.simulation.held import LastStream, TopStream
from tests.simulation.keyed import Workload
from tests.simulation.scheduler import Violation
from tests.simulation.sessions import SessionStream
from tests.simulation.sinks import CalledSink, FirstSink, SealedSink, Sink, TimedSink, UpdatedSink
from tests.simulation.spark import STATE
from tests.simulation.streaming import Checkpoint, Offsets, Stream
from tests.simulation.workload import Entry
from tests.simulation.world import Outcome, World, run_world

#: Steps at which faults are injected into schedules with event time.
_FAULTY_STEPS = 3000
#: Step at which every process that was replaced has ended.
_HEALED = 6000
#: The operators of each kind of query; of any other query it is a count without event time.
_OPERATORS: dict[str, tuple[type[Stream], ...]] = {
    "windows": (WindowedStream,),
    "held": (TopStream, LastStream),
    "duplicates": (FirstStream,),
    "sessions": (SessionStream,),
    "functions": (CalledStream,),
}
#: Kinds by seed.
_KINDS = ("", "windows", "held", "functions", "duplicates", "sessions", "functions")
#: Of the faults of processes where a function is called, how many are of those who call it, or of connections.
_FAULTS_OF_CALLERS = 0.4


class ContinuousWorld(World):
    """Everything of one schedule of a continuous query; see :class:`World`.

    Parameters
    ----------
    drivers
        There are other drivers of the query at times.
    operators
        Which kind of operators it has (:data:`_OPERATORS`). Nobody reads the state of most of them by keys.

    Attributes
    ----------
    slow_tasks
        Of the tasks, how many are much slower than the others.
    epoch_steps
        Steps of the query's trigger, at most.
    """

    stream: Stream
    commit_log: Checkpoint

    def __init__(
        self,
        seed: int,
        *,
        harsh: bool = False,
        rescales: bool = False,
        reads: bool = False,
        drivers: bool = False,
        **operators: bool,
    ) -> None:
        kind = next((kind for kind, is_wanted in operators.items() if is_wanted), "")
        self._operators = _OPERATORS.get(kind, (Stream,))
        super().__init__(seed, harsh=harsh, rescales=rescales, reads=reads and kind in ("", "windows"))
        self.has_more_drivers = drivers
        if not drivers:
            self.fault_profile = replace(self.fault_profile, second_driver=False)
            self._impatience = 0.0
        self.commit_log = Checkpoint()
        #: Ends of the epochs that count, and what was read of the log for that.
        self._decided: dict[int, Offsets] = {}
        self._decided_by: dict[int, str] = {}
        self._read: set[str] = set()
        self._known_objects = 0
        self.sink = self._new_sink()
        #: Bytes of held rows after which a piece is answered at the seal.
        is_held = kind in ("held", "sessions")
        self._most_held_bytes = self.rng.choice((0, 100, epoch_shard.MOST_HELD_BYTES)) if is_held else None
        self._hosts: dict[Life, FunctionHost] = {}
        self.slow_tasks = self.rng.choice((0.0, 0.3, 0.3))
        self.epoch_steps = self.rng.choice((5, 50, 200))
        if self.stream.is_called:
            # A piece takes many steps: tasks are to be apart all the same, and epochs to end while another is committed.
            self.slow_tasks, self.epoch_steps = 0.6, max(5, self.epoch_steps // 10)

    def _draw_workload(self, has_keyed_stores: bool, further_batches: int) -> Workload:
        operator = self._operators[0] if len(self._operators) == 1 else self.rng.choice(self._operators)
        self.stream = operator(self.rng, self._look)
        return self.stream

    def _new_sink(self) -> Sink | TimedSink:
        match self.stream:
            case FirstStream():
                return FirstSink(self.stream, self._look_who)
            case CalledStream():
                return CalledSink(self.stream, self._look_who)
            case TimedStream():
                return (SealedSink if self.stream.is_sealed else UpdatedSink)(self.stream, self._look_who)
        return Sink(self.stream)

    def runs_of(self, life: Life) -> EpochRuns | FunctionHost:
        """Return what has the query's runs in a store actor's process."""
        if not self.stream.is_called:
            return life.actor.runs  # type: ignore[no-any-return]
        if life not in self._hosts:
            self._hosts[life] = FunctionHost(self.cluster, life)
        return self._hosts[life]

    def _fail_process(self) -> None:
        """As of others; and those who call a function are lost, or connections are."""
        tasks = [task for task in self.attempts if isinstance(task, EpochTask) and not task.is_over()]
        callers = [caller for caller in self.attempts if isinstance(caller, Caller) and not caller.is_over()]
        connections = [connection for task in tasks for connection in task.open_connections()]
        if not callers or not connections or self.rng.random() >= _FAULTS_OF_CALLERS:
            super()._fail_process()
        elif self.rng.random() < 0.5:
            self.scheduler.fault("world", "connection_lost")
            self.rng.choice(connections).close()
        elif self.rng.random() < 0.5:
            self._kill(self.rng.choice(callers), "worker")
        else:
            self._freeze(self.rng.choice(callers), "worker", int(3 ** self.rng.uniform(1, 6.5)))

    def _look_who(self) -> dict[int, str]:
        """Return the runs by which epochs count."""
        self._look()
        return self._decided_by

    def _look(self) -> dict[int, Offsets]:
        """Return the ends of the epochs that count, by the state's log."""
        if len(self.stored.ever) != self._known_objects:
            self._known_objects = len(self.stored.ever)
            for path in sorted(self.stored.ever.keys() - self._read):
                self._read.add(path)
                if path.startswith(f"{STATE}/manifest/"):
                    self._take(json.loads(self.stored.ever[path])["records"])
        return self._decided

    def _take(self, records: list[Entry]) -> None:
        for record in records:
            if record["kind"] == "batch_finished" and "end" in record:
                end = tuple(json.loads(record["end"]))
                if self._decided.setdefault(record["batch_id"], end) != end:
                    raise Violation(f"epoch {record['batch_id']} counts with two ends: {end}, {self._decided}")
                self._decided_by.setdefault(record["batch_id"], record["run_id"])

    def _rate(self, rate: float) -> float:
        """As of others; with event time for longer, as what a run begins with matters only where others have sealed epochs."""
        is_faulty = isinstance(self.stream, TimedStream) and self.scheduler.now < _FAULTY_STEPS
        return rate if is_faulty else super()._rate(rate)

    def readable_versions(self) -> int:
        return len(self._look())

    def start_driver(self) -> None:
        self._drivers.append(ContinuousDriver(self, self._label("driver")))

    def each_step(self) -> None:
        super().each_step()
        if self.scheduler.now == _HEALED:
            # Tasks are on the machine of their store actors, where Ray ends a process that it has given up.
            for life in [life for lives in self.cluster.zombies.values() for life in lives]:
                self.cluster.end(life)

    def is_finished(self) -> bool:
        newest = self.commit_log.newest()
        return newest >= 0 and self.stream.is_whole(self.commit_log.ends.get(newest, ()))

    def epoch_finished(self, epoch: int) -> None:
        """Spark has recorded an epoch: from here on its rows count, once, and its results have been emitted."""
        if self.commit_log.finished != list(range(epoch + 1)):
            raise Violation(f"epochs were recorded in the order {self.commit_log.finished}")
        if self.commit_log.ends.get(epoch) not in (None, self._look()[epoch]):
            raise Violation(f"epoch {epoch} is recorded to end at {self.commit_log.ends[epoch]}: {self._look()}")
        self.sink.check_epoch(epoch)
        self._note_event_time(epoch)
        if self._audits_each_batch:
            self._audit_state(f"after epoch {epoch}")

    def _note_event_time(self, epoch: int) -> None:
        """Count epochs in which rows were late, or results came at the seal, or before, and what else is of an operator."""
        if isinstance(self.stream, TimedStream):
            for kind, number in self.stream.happened_in(epoch).items():
                if number:
                    self.scheduler.fault("world", kind, f"in epoch {epoch}: {number}")

    def run(self) -> None:
        with _holding(self._most_held_bytes):
            super().run()
        self.sink.check_newest()


@contextmanager
def _holding(most_bytes: int | None) -> Iterator[None]:
    """Have a shard hold so many bytes of rows before it lets its sources wait; as many as else, if None."""
    usual = epoch_shard.MOST_HELD_BYTES
    epoch_shard.MOST_HELD_BYTES = usual if most_bytes is None else most_bytes
    try:
        yield
    finally:
        epoch_shard.MOST_HELD_BYTES = usual


def run_continuous(seed: int, **kind: bool) -> Outcome:
    """Run one schedule of a continuous query; of a kind by the arguments of :class:`ContinuousWorld`, or by the seed."""
    options = "".join([" --continuous", *(f" --{name}" for name, is_wanted in kind.items() if is_wanted)])
    by_seed = {"rescales": seed % 4 == 1, "reads": seed % 4 == 2, "harsh": seed % 4 == 3, "drivers": seed % 3 == 0}
    kind = kind or by_seed | {_KINDS[seed % len(_KINDS)]: True}
    return replace(run_world(seed, ContinuousWorld(seed, **kind)), options=options)
