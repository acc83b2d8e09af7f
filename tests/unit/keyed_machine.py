"""State machine of a keyed store, and its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from coordinator.model.errors import VersionNotFoundError, WriterBusyError
from coordinator.model.schema import Field
from store_actors.engine.versions import CHANGE_COLUMN, REMOVED, RETAINED_VERSIONS, UPDATED, Change
from store_actors.keyed.read_handle import FOUND_COLUMN, HandleState, ReadHandle
from store_actors.keyed.shard import KeyedShard
from store_actors.keyed.table import RowScan
from store_actors.keyed.update_handle import ADDED, CHANGED, GONE, UpdateHandle
from tests.unit.faults import memory_exhausted
from tests.unit.shard_machine import ShardMachine

KEYS = (Field("a", "int64"), Field("b", "string"))
VALUES = (Field("n", "int64"), Field("s", "binary"))
SCHEMA = pa.schema([field.arrow() for field in (*KEYS, *VALUES)])
Key = tuple[int | None, str | None]
Value = tuple[int | None, bytes | None]
Model = dict[Key, Value]


#: Few keys, so that puts and removes often hit the same keys.
VALUES_OF_A = st.sampled_from([None, -1, 0, 3])
VALUES_OF_B = st.sampled_from([None, "", "ä", "longer than a word"])
KEY = st.tuples(VALUES_OF_A, VALUES_OF_B)
VALUE = st.tuples(st.one_of(st.none(), st.integers(-2, 2)), st.one_of(st.none(), st.binary(max_size=2)))


#: Changes of one version: puts (rows), removes (keys), removes by a condition (limit; an expression or a function); and looks at what
#: falls due (limit) among them.
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.tuples(KEY, VALUE), max_size=8)),
        st.tuples(st.just("remove"), st.lists(KEY, max_size=8)),
        st.tuples(st.just("remove_where"), st.tuples(st.integers(-3, 5), st.booleans())),
        st.tuples(st.just("due"), st.integers(-3, 2)),
    ),
    max_size=6,
)


END = st.one_of(st.none(), st.integers(-2, 4))


def new_shard() -> KeyedShard:
    """Return an empty store whose rows fall due by their number."""
    return KeyedShard(KEYS, VALUES, "n")


def batch_of(rows: list[tuple[Key, Value]]) -> pa.RecordBatch:
    columns = list(zip(*((*key, *value) for key, value in rows), strict=True)) if rows else [()] * 4
    return pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def keys_of(keys: list[Key]) -> pa.RecordBatch:
    return batch_of([(key, (None, None)) for key in keys]).select(["a", "b"])


def model_of(rows: pa.Table | pa.RecordBatch) -> Model:
    lines = rows.to_pylist()
    model = {(row["a"], row["b"]): (row["n"], row["s"]) for row in lines}
    assert len(model) == len(lines), "a key appears twice"
    return model


def in_range(a: Any, start: Any, end: Any) -> bool:
    if a is None:
        return end is None
    return (start is None or a >= start) and (end is None or a < end)


@dataclass
class OpenScan:
    scan: RowScan
    remaining: Model


class KeyedMachine(ShardMachine):
    def __init__(self) -> None:
        super().__init__()
        self.shard = new_shard()
        self.history: dict[int, Model] = {0: {}}
        self.changes: dict[int, Change] = {}
        #: The handle of the only writer, while there is one.
        self.writer: Any = None
        self.pending: Model = {}
        self.readers: list[tuple[ReadHandle, Model]] = []
        self.scans: list[OpenScan] = []

    def any_handle(self, data: st.DataObject) -> tuple[ReadHandle | UpdateHandle, Model]:
        return data.draw(st.sampled_from(self.handles()))

    def handles(self) -> list[tuple[ReadHandle | UpdateHandle, Model]]:
        writer = [] if self.writer is None else [(self.writer, self.pending)]
        return [*self.readers, *writer, (self.shard.read(), self.history[self.shard.version])]

    # -- writing --------------------------------------------------------------------------------------------------

    @rule(changes=CHANGES)
    def write(self, changes: list[tuple[str, Any]]) -> None:
        if self.writer is None:
            self.writer = self.shard.begin(self.shard.version)
            self.pending = dict(self.history[self.shard.version])
        for name, argument in changes:
            if name == "put":
                self.put(argument)
            elif name == "remove":
                self.remove(argument)
            elif name == "due":
                self.due(argument)
            else:
                self.remove_where(*argument)

    @rule(changes=CHANGES)
    def write_a_version(self, changes: list[tuple[str, Any]]) -> None:
        self.write(changes)
        self.commit(prepare_first=False)

    @precondition(lambda self: self.writer is not None)
    @rule()
    def a_second_writer_is_refused(self) -> None:
        with pytest.raises(WriterBusyError):
            self.shard.begin(self.shard.version)

    def put(self, rows: list[tuple[Key, Value]]) -> None:
        self.writer.put(batch_of(rows))
        self.pending = self.pending | dict(rows)

    def remove(self, keys: list[Key]) -> None:
        assert self.writer.remove(keys_of(keys)) == len(set(keys) & self.pending.keys())
        self.pending = {key: value for key, value in self.pending.items() if key not in keys}

    def due(self, limit: int) -> None:
        expected = {key: value for key, value in self.pending.items() if value[0] is not None and value[0] <= limit}
        assert model_of(self.writer.due(limit)) == expected

    def remove_where(self, limit: int, as_expression: bool) -> None:
        removed = {
            key for key, value in self.pending.items() if key[0] is not None and (value[0] or 0) + key[0] > limit
        }
        total = pc.add(pc.field("a"), pc.coalesce(pc.field("n"), pc.scalar(0)))

        def condition(batch: pa.RecordBatch) -> pa.Array:
            return pc.greater(pc.add(batch.column("a"), pc.fill_null(batch.column("n"), 0)), limit)

        assert self.writer.remove_where(total > limit if as_expression else condition) == len(removed)
        self.pending = {key: value for key, value in self.pending.items() if key not in removed}

    @precondition(lambda self: self.writer is not None)
    @rule()
    def updates(self) -> None:
        base, now = self.history[self.writer.version], self.pending
        table = self.writer.updates()
        kinds = {kind: model_of(table.filter(pc.field(CHANGE_COLUMN) == kind)) for kind in (ADDED, CHANGED, GONE)}
        assert kinds[ADDED] == {key: now[key] for key in now.keys() - base.keys()}
        assert kinds[CHANGED] == {key: now[key] for key in now.keys() & base.keys() if now[key] != base[key]}
        assert kinds[GONE] == {key: base[key] for key in base.keys() - now.keys()}

    @precondition(lambda self: self.writer is not None)
    @rule(prepare_first=st.booleans())
    def commit(self, prepare_first: bool) -> None:
        writer, base = self.writer, self.history[self.writer.version]
        prepared = writer.prepare() if prepare_first else None
        change = writer.commit()
        assert prepared is None or prepared is change
        changed = {key: value for key, value in self.pending.items() if base.get(key) != value or key not in base}
        removed = {key: value for key, value in base.items() if key not in self.pending}
        assert model_of(change.delta.filter(pc.field(CHANGE_COLUMN) == UPDATED)) == changed
        assert model_of(change.delta.filter(pc.field(CHANGE_COLUMN) == REMOVED)) == removed
        assert change.rows_removed == len(removed)
        assert change.rows_updated >= len(changed)
        self.history[change.version], self.changes[change.version] = self.pending, change
        self.writer = None

    @precondition(lambda self: self.writer is not None)
    @rule(prepare_first=st.booleans())
    def abort(self, prepare_first: bool) -> None:
        if prepare_first:
            self.writer.prepare()
        self.writer.abort()
        self.writer = None

    # -- errors ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.writer is not None)
    @rule(changes=CHANGES, lines=st.integers(0, 400), end=st.sampled_from(["abort", "commit", "rollback", None]))
    def memory_runs_out(self, changes: list[tuple[str, Any]], lines: int, end: str | None) -> None:
        """After an error at any line, the store is either unchanged or says that it cannot be used any more."""
        version, ending = self.shard.version, False
        try:
            with memory_exhausted(lines) as fault:
                self.write(changes)
                ending = True
                if end is not None:
                    self.finish(end)
        except MemoryError:
            assert fault.was_raised
            if self.shard.is_broken:
                self.all_is_refused()
            if self.shard.is_broken or ending:
                # The owner drops a store that is broken, or whose commit or abort failed: it does not know which version is committed.
                self.load_from_deltas(version)
            else:
                self.writer.abort()
            self.writer = None
            assert model_of(self.shard.snapshot()) == self.history[version]

    def finish(self, end: str) -> None:
        if end == "commit":
            self.commit(prepare_first=False)
        elif end == "abort":
            self.writer.abort()
            self.writer = None
        else:
            self.shard.rollback(self.shard.version)
            self.writer = None

    def all_is_refused(self) -> None:
        assert not self.shard.rollback(self.shard.version)
        for handle in [*[reader for reader, _ in self.readers], *([] if self.writer is None else [self.writer])]:
            if handle.state in (HandleState.READING, HandleState.UPDATING, HandleState.PREPARED):
                for use in (handle.iterator, handle.metrics, lambda reader=handle: reader.get((1, "a"))):
                    with pytest.raises(VersionNotFoundError, match="in the middle of a change"):
                        use()
        for begin in (self.shard.begin, self.shard.read):
            with pytest.raises((VersionNotFoundError, WriterBusyError)):
                begin(self.shard.version)

    # -- versions -------------------------------------------------------------------------------------------------

    @rule(back=st.integers(0, 3))
    def rollback(self, back: int) -> None:
        newest = self.shard.version
        version = max(0, newest - back)
        expected = version in self.shard.retained()
        assert self.shard.rollback(version) is expected
        assert self.shard.version == (version if expected else newest)
        self.writer = None
        self.forget_lost_readers()

    @precondition(lambda self: self.writer is None)
    @rule(from_snapshot=st.booleans(), data=st.data())
    def reload(self, from_snapshot: bool, data: st.DataObject) -> None:
        begin = 0
        fresh, version = new_shard(), self.shard.version
        if from_snapshot and version:
            begin = data.draw(
                st.sampled_from([retained for retained in self.shard.retained() if retained] or [version])
            )
            rows = self.shard.snapshot(begin)
            fresh.load(rows.append_column(CHANGE_COLUMN, pa.array([UPDATED] * len(rows), pa.int8())), begin)
        for number in range(begin + 1, version + 1):
            fresh.load(self.changes[number].delta, number)
        self.shard, self.readers = fresh, []

    def load_from_deltas(self, version: int) -> None:
        """Load a version from its deltas."""
        self.shard, self.readers = new_shard(), []
        for number in range(1, version + 1):
            self.shard.load(self.changes[number].delta, number)

    def forget_lost_readers(self) -> None:
        """Readers of versions that were undone get an error, also after the version's number is used again."""
        lost = [pair for pair in self.readers if pair[0].version > self.shard.version]
        self.readers = [pair for pair in self.readers if pair not in lost]
        for reader, _ in lost:
            with pytest.raises(VersionNotFoundError):
                reader.get((1, "a"))

    # -- reading --------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.readers) < 4)
    @rule(data=st.data())
    def open_reader(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(self.shard.retained()))
        self.readers.append((self.shard.read(version), self.history[version]))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reader, _ = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        reader.release()

    @rule(data=st.data(), keys=st.lists(KEY, max_size=8))
    def get(self, data: st.DataObject, keys: list[Key]) -> None:
        handle, model = self.any_handle(data)
        rows: list[dict[str, Any]] = handle.multi_get(keys_of(keys)).to_pylist()
        assert [(row["a"], row["b"]) for row in rows] == keys
        assert [row[FOUND_COLUMN] for row in rows] == [key in model for key in keys]
        assert [(row["n"], row["s"]) for row in rows] == [model.get(key, (None, None)) for key in keys]
        for key in keys[:1]:
            assert handle.get(key) == (None if key not in model else dict(zip("ns", model[key], strict=True)))

    @rule(
        data=st.data(),
        prefixes=st.lists(VALUES_OF_A, max_size=3),
        start=END,
        end=END,
        begin=VALUES_OF_B,
        stop=VALUES_OF_B,
    )
    def scans_by_key(
        self, data: st.DataObject, prefixes: list[int | None], start: Any, end: Any, begin: Any, stop: Any
    ) -> None:
        handle, model = self.any_handle(data)
        columns = pa.record_batch([pa.array(prefixes, pa.int64())], names=["a"])
        expected = {key: value for key, value in model.items() if key[0] in prefixes}
        assert model_of(handle.prefix_scan(columns, batch_rows=3).read_all()) == expected
        table = handle.range_scan("a", start, end, batch_rows=3).read_all()
        assert model_of(table) == {key: value for key, value in model.items() if in_range(key[0], start, end)}
        order = table.column("a").to_pylist()
        assert order == sorted(order, key=lambda a: (a is None, a))
        strings = handle.range_scan("b", begin, stop).read_all().column("b").to_pylist()
        assert strings == sorted(
            (b for _, b in model if in_range(b, begin, stop)), key=lambda b: (b is None, (b or "").encode())
        )

    @precondition(lambda self: len(self.scans) < 4)
    @rule(data=st.data())
    def open_scan(self, data: st.DataObject) -> None:
        handle, model = self.any_handle(data)
        self.scans.append(OpenScan(handle.iterator(batch_rows=4), dict(model)))

    @precondition(lambda self: self.scans)
    @rule(data=st.data(), steps=st.integers(1, 9))
    def advance_scan(self, data: st.DataObject, steps: int) -> None:
        """A scan returns the store as it was when the scan was opened."""
        index = data.draw(st.integers(0, len(self.scans) - 1))
        open_scan = self.scans[index]
        for _ in range(steps):
            batch = next(open_scan.scan, None)
            if batch is None:
                assert not open_scan.remaining
                del self.scans[index]
                return
            assert 0 < batch.num_rows <= 4
            for key, value in model_of(batch).items():
                assert open_scan.remaining.pop(key) == value

    @rule()
    def every_handle_reads_its_version(self) -> None:
        for handle, model in self.handles():
            assert len(handle) == len(model)
            assert model_of(handle.iterator().read_all()) == model

    @invariant()
    def equals_model(self) -> None:
        """Readers are not called here, so that they also have to catch up with many steps at once."""
        newest = self.history[self.shard.version]
        assert model_of(self.shard.snapshot()) == newest
        assert len(self.shard.retained()) <= RETAINED_VERSIONS + 1
        self.readers = [pair for pair in self.readers if pair[0].version in self.shard.retained()]
        if self.writer is not None:
            assert model_of(self.writer.iterator().read_all()) == self.pending
        assert len(self.shard) == len(newest if self.writer is None else self.pending)
