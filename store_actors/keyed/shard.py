"""A keyed state store on one shard: Spark's ``StateStore`` contract in Arrow batches. Pure logic, no Ray, no Spark, no I/O.

A :class:`KeyedShard` is one named store of one partition. One :class:`UpdateHandle` at a time makes its next version; any
number of :class:`ReadHandle` read retained versions meanwhile::

    handle = shard.begin(shard.version)  # UPDATING
    handle.put(batch)
    change = handle.prepare()            # PREPARED: what the delta file holds; then make it durable
    handle.commit()                      # COMMITTED, or handle.abort(): ABORTED

Keys are equal if their bits are (as Spark compares the bytes of rows): -0.0 and 0.0 are two keys. Handles and scans are not
thread-safe, and reading enters strings into the shard's pool: the owner locks. An error from inside the engine (memory
exhausted) that comes in the middle of a change breaks the shard (:attr:`KeyedShard.is_broken`): nothing of it can be read or
changed any more, through any handle; its owner forgets it, and loads it again.
"""

from __future__ import annotations

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError, VersionNotFoundError, WriterBusyError
from coordinator.model.schema import Field
from coordinator.model.type_names import has_map, string_to_type, type_to_string
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.table_view import ShardView, TableView, VersionView
from store_actors.engine.versions import CHANGE_COLUMN, Change, Frozen, frozen_pieces
from store_actors.keyed.checks import checked_table
from store_actors.keyed.read_handle import ReadHandle
from store_actors.keyed.table import KeyedTable
from store_actors.keyed.update_handle import UpdateHandle


class KeyedShard:
    """A named store of one partition: rows of value columns under keys, at its newest version and the ones before.

    Parameters
    ----------
    keys
        Key columns, at least one. A key column may hold nulls unless its field says no.
    due
        Value column by which rows fall due (:meth:`UpdateHandle.due`), of type int64; none by default.

    Raises
    ------
    InvalidRequestError
        No key column, a name that is there twice or starts with two underscores, an unknown type, or `due` is not int64
        value column.
    """

    def __init__(
        self,
        keys: tuple[Field, ...],
        values: tuple[Field, ...],
        due: str | None = None,
        seed: int = 0,
        memory: Memory = HEAP,
    ) -> None:
        _check_fields(keys, values)
        if due is not None and (due, "int64") not in [(field.name, field.type) for field in values]:
            raise InvalidRequestError("rows fall due by a value column of type int64", column=due)
        self._table = table = KeyedTable(keys, values, due, seed, memory)
        #: Schema of rows and deltas.
        self.schema = table.schema
        self.room, self.reserve, self.clear_columns = table.room, table.reserve, table.clear_columns
        self._writer: UpdateHandle | None = None
        #: Version that was loaded last; nothing was made on top of it.
        self._loaded: int | None = None

    def __len__(self) -> int:
        return len(self._table)

    @property
    def version(self) -> int:
        """The newest committed version."""
        return self._table.version

    def retained(self) -> list[int]:
        """Return the versions that can be read and gone back to in memory, oldest first; none of a store that is broken."""
        return [] if self.is_broken else list(self._table.retained())

    @property
    def watermark_ms(self) -> int:
        """Watermark that was committed with the newest version, in milliseconds since the epoch."""
        return self._table.watermark_ms

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes, with what older versions and a pending change need."""
        return self._table.nbytes

    @property
    def is_broken(self) -> bool:
        """Whether an error cut a change short: its owner forgets the shard."""
        return self._table.is_broken

    # -- handles --------------------------------------------------------------------------------------------------

    def begin(self, version: int, next_version: int | None = None) -> UpdateHandle:
        """Return the writer of the version after `version`, which must be the newest.

        Raises
        ------
        VersionNotFoundError
            The version is negative, or not in memory.
        WriterBusyError
            Another handle is updating.
        InvalidRequestError
            Memory holds newer versions, or `next_version` is not newer.
        """
        self._check_version(version)
        if self._writer is not None:
            raise WriterBusyError(
                "another handle is changing this store; nothing was changed; commit or abort that one first",
                version=version,
                writing=self._writer.next_version,
            )
        if version != self.version:
            raise InvalidRequestError(
                "the store is at a newer version; nothing was changed; go back with rollback first, then begin",
                version=version,
                newest=self.version,
            )
        target = version + 1 if next_version is None else next_version
        self._table.check_next(target)
        self._loaded = None
        with self._table.changing():
            self._writer = UpdateHandle(self._table, target, self._end_writing)
        return self._writer

    def read(self, version: int | None = None) -> ReadHandle:
        """Return a reader of a retained version; of the newest committed one by default.

        Raises
        ------
        VersionNotFoundError
            The version is negative, or not in memory.
        """
        target = self.version if version is None else version
        self._check_version(target)
        return ReadHandle(self._table, target)

    def _check_version(self, version: int) -> None:
        if version < 0:
            raise VersionNotFoundError("versions are counted from 0, the empty store", version=version)
        self._table.check_whole()
        if version not in self._table.retained():
            raise VersionNotFoundError(
                "the version is not in memory; nothing was changed; load it from its files",
                version=version,
                retained=self.retained(),
            )

    # -- versions -------------------------------------------------------------------------------------------------

    def commit(self) -> Change:
        """Commit the handle that is updating; see :meth:`UpdateHandle.commit`."""
        return self._updating().commit()

    def abort(self) -> None:
        """Abort the handle that is updating; see :meth:`UpdateHandle.abort`."""
        self._updating().abort()

    def _updating(self) -> UpdateHandle:
        if self._writer is None:
            raise InvalidRequestError("the store has no uncommitted change", version=self.version)
        return self._writer

    def rollback(self, version: int) -> bool:
        """Abort what is being written and go back to a retained version; False if the version must be loaded.

        Raises
        ------
        VersionNotFoundError
            The version is negative.
        """
        if version < 0:
            raise VersionNotFoundError("versions are counted from 0, the empty store", version=version)
        if self._writer is not None:
            self._writer.abort()
        return self._table.rollback(version)

    def load(self, delta: pa.Table, version: int, watermark_ms: int = 0) -> None:
        """Replay a committed delta (or a snapshot, whose rows are all updates) on top of the newest version.

        Older versions are no longer in memory afterwards. A snapshot may come in pieces, one call each.

        Raises
        ------
        WriterBusyError
            A handle is updating.
        InvalidRequestError
            Columns are not those of this store's deltas, or `version` is not newer.
        """
        if self._writer is not None:
            raise WriterBusyError("a version cannot be loaded while another is written; abort that first")
        self._table.check_whole()
        if version != self._loaded:
            self._table.check_next(version)
        fields = (*self.schema.keys, *self.schema.state_fields, Field(CHANGE_COLUMN, "int8"))
        self._table.load(checked_table(delta, fields), version, watermark_ms)
        self._loaded = version

    def snapshot(self, version: int | None = None) -> pa.Table:
        """Return all rows of a retained version (the newest committed one by default), in ``row_schema``.

        Raises errors as :meth:`read`.
        """
        with self.read(version) as handle:
            return handle.iterator().read_all()

    def frozen(self) -> Frozen:
        """Return :meth:`snapshot` of the newest committed version as it is now, in pieces."""
        self._table.check_whole()
        return frozen_pieces(VersionView(self._table, self.version).frozen_rows(), self._table.table.decode_frozen)

    def view(self, version: int) -> ShardView:
        """Return a retained version, to be read without a handle; raises errors as :meth:`read`."""
        self._check_version(version)
        return TableView(self._table, version)

    def _end_writing(self, writer: UpdateHandle) -> None:
        self._writer = None


def _check_fields(keys: tuple[Field, ...], values: tuple[Field, ...]) -> None:
    names = [field.name for field in (*keys, *values)]
    if not keys:
        raise InvalidRequestError("a keyed store needs at least one key column", columns=names)
    wrong = [name for name in names if names.count(name) > 1 or name.startswith("__")]
    if wrong:
        raise InvalidRequestError(
            "columns of a keyed store have distinct names that do not start with two underscores", columns=wrong
        )
    for field in keys:
        if has_map(field.type):
            raise InvalidRequestError(
                "a key has no maps in it, as in Spark: the same entries in another order are another map; use an array of entries",
                column=field.name,
                type=field.type,
            )
    for field in (*keys, *values):
        try:
            kept_as = type_to_string(string_to_type(field.type))
        except (KeyError, ValueError) as error:
            raise _not_held(field) from error
        if kept_as != field.type:  # what only passes, or only accumulators have
            raise _not_held(field)


def _not_held(field: Field) -> InvalidRequestError:
    return InvalidRequestError("a keyed store cannot hold this type", column=field.name, type=field.type)
