"""A schedule of a continuous query: the world of the others, with connections, tasks that go on, and epochs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from store_actors.epochs import shard as epoch_shard
from tests.simulation.continuous import ContinuousDriver
from tests.simulation.event_time import TimedStream, WindowedStream
from tests.simulation.held import LastStream, TopStream
from tests.simulation.keyed import Workload
from tests.simulation.scheduler import Violation
from tests.simulation.sinks import SealedSink, Sink, TimedSink, UpdatedSink
from tests.simulation.spark import STATE
from tests.simulation.streaming import Checkpoint, Offsets, Stream
from tests.simulation.workload import Entry
from tests.simulation.world import Outcome, World, run_world

#: Steps at which faults are injected into schedules with event time.
_FAULTY_STEPS = 3000
#: Step at which every process that was replaced has ended.
_HEALED = 6000


class ContinuousWorld(World):
    """Everything of one schedule of a continuous query; see :class:`World`.

    Parameters
    ----------
    drivers
        There are other drivers of the query at times.
    windows
        Its operator has event time, and mostly emits groups once they are closed; without this or the next one it has none.
    held
        Its operator has event time, and holds the rows of an epoch until the seal. Nobody reads its state by keys.

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
        windows: bool = False,
        held: bool = False,
    ) -> None:
        self._operators = (TopStream, LastStream) if held else (WindowedStream if windows else Stream,)
        super().__init__(seed, harsh=harsh, rescales=rescales, reads=reads and not held)
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
        self._most_held_bytes = self.rng.choice((0, 100, epoch_shard.MOST_HELD_BYTES)) if held else None
        self.slow_tasks = self.rng.choice((0.0, 0.3, 0.3))
        self.epoch_steps = self.rng.choice((5, 50, 200))

    def _draw_workload(self, has_keyed_stores: bool, further_batches: int) -> Workload:
        operator = self._operators[0] if len(self._operators) == 1 else self.rng.choice(self._operators)
        self.stream = operator(self.rng, self._look)
        return self.stream

    def _new_sink(self) -> Sink | TimedSink:
        if not isinstance(self.stream, TimedStream):
            return Sink(self.stream)
        return (SealedSink if self.stream.is_sealed else UpdatedSink)(self.stream, self._look_who)

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
        """Count epochs in which rows were late, or results came at the seal, or before."""
        if isinstance(self.stream, TimedStream):
            how = "emitted_at_seal" if self.stream.is_sealed else "emitted_by_windows"
            happened = {"late": self.stream.late_in(epoch), how: len(self.stream.emitted_in(epoch))}
            for kind, number in happened.items():
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
    by_seed |= {"windows": seed % 5 in (1, 4), "held": seed % 5 == 2}
    kind = kind or by_seed
    return replace(run_world(seed, ContinuousWorld(seed, **kind)), options=options)
