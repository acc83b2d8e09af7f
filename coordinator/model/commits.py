"""Commits and snapshots as the manifest log records them; field names are the format (``docs/format.md``)."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec
from msgspec import Struct, structs

from coordinator.model.identities import DEFAULT_STORE, ShardKey
from coordinator.model.stored_json import always_written
from coordinator.model.watermarks import Watermarks


class CommitEntry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A shard's line in the manifest: the delta file that makes ``version`` of the shard."""

    partition_id: int
    version: int
    base_version: int
    epoch: int
    run_id: str
    #: Made once per logical commit; a retry repeats it, so that its writer recognises a commit that landed as its own.
    attempt_id: str
    #: Path of the delta file relative to the fleet's URI.
    file: str
    file_bytes: int
    #: CRC-32 of the whole file.
    checksum: int
    #: Rows of the delta file; updated and removed are what it did to the shard.
    delta_rows: int
    rows_updated: int
    rows_removed: int
    #: Rows in the shard after this commit.
    state_rows: int
    state_bytes: int
    #: Rows that reached the shard in this batch, late ones included; late rows dropped.
    rows_in: int
    rows_late: int
    watermark_ms: int
    committed_at_ms: int
    executor: str = always_written("")
    store_name: str = always_written(DEFAULT_STORE)
    #: The watermark for the operators that this one feeds.
    output_watermark_ms: int = always_written(0)
    #: :attr:`TaskIdentity.batch_time_ms`: tells versions of one number from different histories of a query apart.
    batch_time_ms: int | None = None
    #: Earliest time at which a row falls due by processing time; None if none does.
    due_ms: int | None = None
    #: :attr:`TaskIdentity.is_import`.
    is_import: bool = False
    #: How long the shard worked on the rows, and on writing the delta, in milliseconds. Not recorded.
    apply_ms: int = 0
    write_ms: int = 0
    #: How long the shard took to come to its base version beforehand, bytes of the files that were read for it, and commits of it that
    #: failed since the last one that counted, by error. Not recorded.
    restore_ms: int = 0
    load_bytes: int = 0
    failures: Mapping[str, int] = msgspec.field(default_factory=dict)
    #: Of an epoch of a continuous query, the longest that a row of its tasks waited, from its task to its answer, and in how many
    #: pieces its rows came. Not recorded.
    waited_ms: int | None = None
    pieces: int = 0

    @property
    def shard(self) -> ShardKey:
        return self.partition_id, self.store_name

    @property
    def watermarks(self) -> Watermarks:
        return Watermarks(self.watermark_ms, self.output_watermark_ms)

    def recorded(self) -> CommitEntry:
        """Return the commit without the fields that are not recorded."""
        return structs.replace(
            self, apply_ms=0, write_ms=0, restore_ms=0, load_bytes=0, failures=_NOTHING, waited_ms=None, pieces=0
        )

    def share_values(self) -> CommitEntry:
        """Replace texts and empty mappings by equal ones that commits have in common, and return this commit.

        A coordinator keeps all retained commits in memory. This commit is changed in place: copies took a quarter of the time in which
        a log is read.
        """
        for name in _SHARED_TEXTS:
            structs.force_setattr(self, name, sys.intern(getattr(self, name)))
        if not self.failures:
            structs.force_setattr(self, "failures", _NOTHING)
        return self


class PartitionCommit(Struct, frozen=True):
    """The commits of all stores of a partition by one attempt."""

    entries: tuple[CommitEntry, ...]
    #: Whether its lease came with the commit before, so that the coordinator was not asked for it.
    is_piggybacked: bool = False


#: The mapping of commits without failures; it is never changed.
_NOTHING: Mapping[str, int] = {}
#: Fields whose values many commits have alike.
_SHARED_TEXTS = ("run_id", "executor", "store_name")


class StoredFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the object store: path relative to the fleet's URI, size in bytes, CRC-32 of all of it."""

    file: str
    file_bytes: int
    checksum: int


class SnapshotEntry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A snapshot: all rows of a committed version of a shard, in one file or, of a large shard, several."""

    partition_id: int
    version: int
    #: Attempt of the commit that made the version: a snapshot of a superseded commit never counts.
    attempt_id: str
    file: str
    file_bytes: int
    #: CRC-32 of the whole file.
    checksum: int
    rows: int
    watermark_ms: int
    created_at_ms: int
    store_name: str = always_written(DEFAULT_STORE)
    #: Files after the first one.
    further: tuple[StoredFile, ...] = ()

    @property
    def shard(self) -> ShardKey:
        return self.partition_id, self.store_name

    @property
    def pieces(self) -> tuple[StoredFile, ...]:
        """All its files, in order."""
        return (StoredFile(self.file, self.file_bytes, self.checksum), *self.further)

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all its files."""
        return tuple(piece.file for piece in self.pieces)
