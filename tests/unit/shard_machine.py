"""Bases of the state machines: a shard that is read and compacted while it changes, and versions of an operator's shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.model.errors import InvalidRequestError
from store_actors.engine import expiry_queue, versions
from store_actors.engine.table_view import ShardView
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED, Change, Frozen
from store_actors.epochs.folding import emitted_table
from store_actors.messages.requests import ShardInput
from store_actors.operators.make_shard import view_of
from store_actors.serving.partition import Views

Model = TypeVar("Model")


def tables_of(shard: Any) -> list[Any]:
    """Return the tables of any kind of shard."""
    if hasattr(shard, "_sides"):
        return [side.table for side in shard._sides]
    return [shard._table.table if hasattr(shard, "_table") else shard.table]


def read_frozen(frozen: Frozen, schema: pa.Schema) -> pa.Table:
    """Return all rows that have not been read of a frozen shard."""
    return pa.concat_tables([schema.empty_table(), *(table for make_tables in frozen for table in make_tables())])


def view_of_any(shard: Any, version: int) -> ShardView:
    """Return a view of a version of any kind of shard."""
    return shard.view(version) if hasattr(shard, "view") else view_of(shard, version)


class ShardMachine(RuleBasedStateMachine):
    """A shard that is frozen at any moment, and whose frozen rows are read a few at a time while it changes.

    Every version that the shard retains is read as well, also while the next one is pending. Its tables are compacted after every
    version, or only when their pools have doubled; the queues of rows that expire are rebuilt early, or never.

    Attributes
    ----------
    shard
        The shard, of any operator.
    """

    shard: Any

    def __init__(self) -> None:
        super().__init__()
        #: Rows of each version, by the serial number of the history that made it.
        self._noted: dict[int, pa.Table] = {}
        self._views, self._viewed = Views(), None
        #: What is not read yet of the frozen shard, if there is one.
        self._frozen: Any = None
        self._then: list[str] = []
        self._read: list[str] = []
        self._small = versions._SMALL_POOL, expiry_queue._SMALL

    @initialize(compacts_always=st.booleans(), rebuilds_early=st.booleans())
    def choose_when_to_compact(self, compacts_always: bool, rebuilds_early: bool) -> None:
        if compacts_always:
            versions._SMALL_POOL = -(1 << 40)
        if rebuilds_early:
            expiry_queue._SMALL = 8

    @precondition(lambda self: self._frozen is None)
    @rule(words=st.sampled_from([1, 16, 64, 1 << 20]))
    def freeze(self, words: int) -> None:
        shard = self.shard
        for table in tables_of(shard):
            table.snapshot_bytes = 8 * words
        self._then, self._read = sorted(map(repr, shard.snapshot().to_pylist())), []
        self._frozen = shard.frozen()

    @precondition(lambda self: self._frozen is not None)
    @rule(pieces=st.integers(1, 3))
    def read_some(self, pieces: int) -> None:
        for _ in range(pieces):
            make_tables = next(self._frozen, None)
            if make_tables is None:
                self._frozen = None
                assert sorted(self._read) == self._then
                return
            self._read += [repr(row) for table in make_tables() for row in table.to_pylist()]

    @precondition(lambda self: self._frozen is not None)
    @rule()
    def stop_reading(self) -> None:
        self._frozen.close()
        self._frozen = None

    def retained(self) -> tuple[dict[int, int], bool]:
        """Return the versions in memory, each with the serial number of its history, and whether another one is pending."""
        shard = self.shard
        store = shard._sides[0] if hasattr(shard, "_sides") else getattr(shard, "_table", shard)
        if store is not self._viewed:
            self._views.clear()
            self._viewed = store
        return store.retained(), store._pending is not None

    @invariant()
    def note_version(self) -> None:
        retained, is_pending = self.retained()
        newest = list(retained.values())[-1]
        if not is_pending and newest not in self._noted:
            self._noted[newest] = self.shard.snapshot()

    @rule(index=st.integers(0, 2), offset=st.integers(0, 9), size=st.sampled_from([2, 1000]))
    def read_version(self, index: int, offset: int, size: int) -> None:
        shard = self.shard
        retained, _ = self.retained()
        version, serial = list(retained.items())[index % len(retained)]
        if serial not in self._noted:
            return
        noted = self._noted[serial]
        view = self._views.of("", version, lambda: view_of_any(shard, version))
        names = [field.name for field in shard.schema.input_keys]
        if names:
            all_keys = pa.concat_tables([table.select(names) for table in self._noted.values()]).combine_chunks()
            (keys,) = all_keys.slice(offset, size).to_batches() or [pa.RecordBatch.from_pylist([], all_keys.schema)]
            # A view that has been read looks keys up in another way than a fresh one.
            self._check_find(view_of_any(shard, version), keys, noted)
            self._check_find(view, keys, noted)
        rows = read_frozen(view.frozen(noted.column_names), noted.schema)
        assert sorted(map(repr, rows.to_pylist())) == sorted(map(repr, noted.to_pylist()))

    @staticmethod
    def _check_find(view: ShardView, keys: pa.RecordBatch, noted: pa.Table) -> None:
        indices, rows = view.find(keys, noted.column_names)
        assert list(indices) == sorted(indices)
        searched = [repr(key) for key in keys.to_pylist()]
        of_key: dict[str, list[str]] = {key: [] for key in searched}
        for key, row in zip(noted.select(keys.schema.names).to_pylist(), noted.to_pylist(), strict=True):
            if repr(key) in of_key:
                of_key[repr(key)].append(repr(row))
        expected = [row for key in searched for row in sorted(of_key[key])]
        in_order = sorted(zip(indices, map(repr, rows.to_pylist()), strict=True))
        assert [row for _, row in in_order] == expected

    def teardown(self) -> None:
        while self._frozen is not None:
            self.read_some(1)
        versions._SMALL_POOL, expiry_queue._SMALL = self._small


def _pieces(rows: ShardInput) -> Iterator[ShardInput]:
    """Yield the rows of a batch in their order: those of the first table in two pieces, and of each further table in one."""
    middle = rows.raw.num_rows // 2
    cuts = [(0, rows.raw.slice(0, middle)), (0, rows.raw.slice(middle))]
    cuts += [(number, table) for number, table in enumerate(rows.tables) if number]
    for index, (number, table) in enumerate(cuts):
        tables = tuple(table if number == other else empty.slice(0, 0) for other, empty in enumerate(rows.tables))
        yield ShardInput(tables, 0 if index else rows.rows_read)


class OperatorMachine(ShardMachine, Generic[Model]):
    """A shard of an operator that is committed, aborted, rolled back, and loaded from its deltas or a snapshot.

    An operator gives :meth:`new_shard`, :meth:`no_rows` and :meth:`check`. It calls :meth:`begin` in its constructor or in an initial
    rule, and has a rule that applies rows (:meth:`apply_input`) and keeps the change with its model (:meth:`applied`).

    Attributes
    ----------
    models, changes
        Model of each version, and the change that made it.
    pending
        Change that is neither committed nor aborted, with the model of the shard after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[int, Model] = {}
        self.changes: dict[int, Change] = {}
        self.pending: tuple[Change, Model] | None = None

    # -- for the operator --------------------------------------------------------------------------------------------

    def new_shard(self) -> Any:
        """Return an empty shard of the operator."""
        raise NotImplementedError

    def no_rows(self) -> ShardInput:
        """Return an input without rows."""
        raise NotImplementedError

    def check(self, model: Model) -> None:
        """Compare the newest rows of the shard, pending ones included, with a model."""
        raise NotImplementedError

    # -- versions -------------------------------------------------------------------------------------------------

    def begin(self, empty: Model) -> None:
        """Start at version 0, with its model."""
        self.shard = self.new_shard()
        self.models[0] = empty
        assert len(self.shard) == 0

    @property
    def newest(self) -> Model:
        """Model of the newest committed version."""
        return self.models[self.shard.version]

    @property
    def watermark_ms(self) -> int:
        """Watermark of the newest committed version."""
        version = self.shard.version
        return self.changes[version].watermark_ms if version else 0

    def apply_input(self, rows: ShardInput, watermark_ms: int) -> Change:
        """Apply rows as the next version, each second time in pieces if the shard takes such, and return the change."""
        version = self.shard.version + 1
        if version % 2 and hasattr(self.shard, "fold"):
            self.shard.open(version)
            emitted = [emitted_table(self.shard.fold(piece)) for piece in _pieces(rows)]
            change: Change = self.shard.seal(watermark_ms)
            assert sum(rows.num_rows for rows in emitted) >= change.rows_updated
        else:
            change = self.shard.apply(rows, watermark_ms, version)
        note(f"version {change.version}: {change.delta.to_pylist()}")
        assert (change.rows_in, change.watermark_ms) == (rows.rows_read, watermark_ms)
        return change

    def applied(self, change: Change, model: Model) -> None:
        """Keep a pending change, and the model of the shard with it."""
        self.pending = (change, model)

    @precondition(lambda self: self.pending is not None)
    @rule()
    def apply_twice_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="uncommitted"):
            self.shard.apply(self.no_rows(), 0, self.shard.version + 1)

    @precondition(lambda self: self.pending is not None)
    @rule()
    def commit(self) -> None:
        assert self.pending is not None
        change, model = self.pending
        assert self.shard.commit() == change.version
        self.models[change.version], self.changes[change.version] = model, change
        self.pending = None

    @precondition(lambda self: self.pending is not None)
    @rule()
    def abort(self) -> None:
        self.shard.abort()
        self.pending = None

    @rule(back=st.integers(-1, 4))
    def rollback(self, back: int) -> None:
        """Go back to a version that is in memory, and to no other, nor on to one; a pending change is dropped."""
        newest = self.shard.version
        version = max(0, newest - back)
        is_retained = version in self.retained()[0]
        assert self.shard.rollback(version) is is_retained
        assert self.shard.version == (version if is_retained else newest)
        self.pending = None

    @precondition(lambda self: self.pending is None)
    @rule(from_snapshot=st.booleans())
    def reload(self, from_snapshot: bool) -> None:
        """Load a new shard, from a snapshot of the newest version or from every delta."""
        fresh, version = self.new_shard(), self.shard.version
        if from_snapshot:
            rows = self.shard.snapshot()
            kinds = pa.array(np.full(len(rows), UPDATED), pa.int8())
            fresh.load(rows.append_column(CHANGE_COLUMN, kinds), version, self.watermark_ms)
        else:
            for change in (self.changes[number] for number in range(1, version + 1)):
                fresh.load(change.delta, change.version, change.watermark_ms)
        assert (fresh.version, fresh.watermark_ms) == (version, self.watermark_ms)
        self.shard = fresh

    @invariant()
    def equals_model(self) -> None:
        self.check(self.newest if self.pending is None else self.pending[1])
        if self.pending is None:
            assert self.shard.watermark_ms == self.watermark_ms
