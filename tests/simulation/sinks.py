"""What a continuous query has emitted, and what it should have."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from tests.simulation.event_time import TimedStream, check_same
from tests.simulation.scheduler import Violation
from tests.simulation.streaming import Stream
from tests.simulation.workload import Groups, Key, compare


class Sink:
    """What a query has emitted: results of groups, in the order in which they came."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.results: dict[tuple[str, int, int], int] = {}
        #: By run and key, the newest result.
        self._newest: dict[tuple[str, str], int] = {}

    def write(self, run: str, began: int, epoch: int, groups: Groups) -> None:
        """Take results of a run: each is a count of some records, each counted once, and those of a run are in their order."""
        for (_, name), (n, total, _) in groups.items():
            if n < self._newest.get((run, name), 0):
                raise Violation(f"a result of {name} counts {n} records, and the one before {self._newest[run, name]}")
            self._newest[run, name] = n
            everything = self._stream.counted(tuple(map(len, self._stream.source)))[None, name][1]
            if total.bit_count() != n or total & ~everything:
                raise Violation(f"a result counts {n} records of {name}, and these were {total:b}")
            self.results[name, n, total] = self.results.get((name, n, total), 0) + 1

    def check_epoch(self, epoch: int) -> None:
        """Check that the newest result of each key that an epoch changed was emitted before Spark's log has the epoch."""
        before, after = self._stream.at(epoch), self._stream.at(epoch + 1)
        for key, (n, total, _) in after.items():
            if before.get(key) != after[key] and (key[1], n, total) not in self.results:
                raise Violation(f"epoch {epoch} is in Spark's log, and its result of {key[1]}, {n}, was not emitted")

    def check_newest(self) -> None:
        """Check that the newest result of each key, which is the largest count, is that of all records."""
        newest: Groups = {}
        for name, n, total in self.results:
            if n > newest.get((None, name), (0, 0, 0))[0]:
                newest[None, name] = (n, total, 0)
        compare("the newest results", newest, self._stream.counted(tuple(map(len, self._stream.source))))


class TimedSink:
    """What a query with event time has emitted, by run.

    Parameters
    ----------
    decided_by
        Returns the runs by which epochs count.
    """

    def __init__(self, stream: TimedStream, decided_by: Callable[[], Mapping[int, str]]) -> None:
        self._stream, self._decided_by = stream, decided_by

    def write(self, run: str, began: int, epoch: int, groups: Groups) -> None:
        """Take results that a task of a run got in an epoch: each may be one, and was not over when the run began."""
        closed_ms = self._stream.watermark_at(began)
        for key, row in groups.items():
            self._stream.check_result(key, row)
            if key[0] is None or key[0] * 1000 <= closed_ms:
                raise Violation(f"epoch {epoch} emits {key}, which was over when the run began with {began}")
            self._take(run, epoch, key, row)

    @abstractmethod
    def _take(self, run: str, epoch: int, key: Key, row: Any) -> None:
        """Take a result."""

    @abstractmethod
    def check_epoch(self, epoch: int) -> None:
        """Check what the run by which an epoch counts has emitted in it."""

    def check_newest(self) -> None:
        """Check all epochs that count, now that nothing more comes."""
        for epoch in sorted(self._decided_by()):
            self.check_epoch(epoch)


class UpdatedSink(TimedSink):
    """Results that come with the rows that changed them."""

    def __init__(self, stream: TimedStream, decided_by: Callable[[], Mapping[int, str]]) -> None:
        super().__init__(stream, decided_by)
        self._results: defaultdict[tuple[str, Key], list[Any]] = defaultdict(list)

    def _take(self, run: str, epoch: int, key: Key, row: Any) -> None:
        results = self._results[run, key]
        if results and row[0] < results[-1][0]:
            raise Violation(f"a result of {key} counts {row[0]} records, and the one before {results[-1][0]}")
        results.append(row)

    def check_epoch(self, epoch: int) -> None:
        """Check that the newest result of each group that an epoch changed was emitted in its run."""
        run = self._decided_by()[epoch]
        for key, row in self._stream.emitted_in(epoch).items():
            if row not in self._results[run, key]:
                raise Violation(f"epoch {epoch} counts, and its result of {key}, {row}, was not emitted")


class SealedSink(TimedSink):
    """Results that come when an epoch is sealed, once in it. An epoch of a run that does not count may have others."""

    def __init__(self, stream: TimedStream, decided_by: Callable[[], Mapping[int, str]]) -> None:
        super().__init__(stream, decided_by)
        self._results: defaultdict[tuple[str, int], Groups] = defaultdict(dict)

    def _take(self, run: str, epoch: int, key: Key, row: Any) -> None:
        results = self._results[run, epoch]
        if key in results:
            raise Violation(f"epoch {epoch} of a run emits {key} twice: {results[key]} and {row}")
        results[key] = row

    def check_epoch(self, epoch: int) -> None:
        """Check that the run by which an epoch counts has emitted what it should in it, and nothing else."""
        emitted, expected = self._results[self._decided_by()[epoch], epoch], self._stream.emitted_in(epoch)
        check_same(f"the results of epoch {epoch}", emitted, expected)


class FirstSink(TimedSink):
    """First rows, which come as they are found: each once in a run, and none of a key that was known."""

    def __init__(self, stream: TimedStream, decided_by: Callable[[], Mapping[int, str]]) -> None:
        super().__init__(stream, decided_by)
        self._results: defaultdict[str, Groups] = defaultdict(dict)
        self._keys: defaultdict[tuple[str, int], set[Key]] = defaultdict(set)

    def _take(self, run: str, epoch: int, key: Key, row: Any) -> None:
        if key in self._results[run]:
            raise Violation(f"a run emits {key} twice: {self._results[run][key]} and {row}")
        self._results[run][key] = row
        self._keys[run, epoch].add(key)

    def check_epoch(self, epoch: int) -> None:
        """Check that a row was emitted of each key that an epoch made known, and of no other key."""
        run, expected = self._decided_by()[epoch], self._stream.emitted_in(epoch)
        for key, marks in expected.items():
            mark: Any = self._results[run].get(key)
            if mark not in marks:
                raise Violation(f"epoch {epoch} counts, and emits {key} as {mark}, not of {marks}")
        others = self._keys[run, epoch] - expected.keys()
        if others:
            raise Violation(f"epoch {epoch} emits rows of keys that were known: {others}")


class CalledSink(UpdatedSink):
    """Results of calls of a function: those of rows as they come, and those of groups that time out once, in their epoch."""

    def __init__(self, stream: TimedStream, decided_by: Callable[[], Mapping[int, str]]) -> None:
        super().__init__(stream, decided_by)
        self._last: defaultdict[tuple[str, int], Groups] = defaultdict(dict)

    def _take(self, run: str, epoch: int, key: Key, row: Any) -> None:
        super()._take(run, epoch, key, row)
        if _is_last(key):
            if len(self._results[run, key]) > 1:
                raise Violation(f"a group times out twice in a run: {key}")
            self._last[run, epoch][key] = row

    def check_epoch(self, epoch: int) -> None:
        """As of others; and that just those groups have timed out that should have."""
        super().check_epoch(epoch)
        expected = {key: row for key, row in self._stream.emitted_in(epoch).items() if _is_last(key)}
        check_same(f"what timed out in epoch {epoch}", self._last[self._decided_by()[epoch], epoch], expected)


def _is_last(key: Any) -> bool:
    """Return whether a result is of a group that has timed out."""
    return bool(key[2])
