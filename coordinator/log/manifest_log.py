"""The manifest log of one state in object storage.

``<state>/manifest/<seq>.json`` (20 digits, from 1, no gaps) has the records of one append. Each file is created with
put-if-absent: of two coordinators that both take themselves for the fleet's only one gets a sequence number, and the other one
learns what was decided meanwhile. A checkpoint is the ledger after an append, so that loading reads little
(:mod:`coordinator.log.log_files`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from coordinator.ledger.checkpoints import (
    PART_RECORDS,
    CheckpointPlan,
    Part,
    Since,
    Written,
    in_parts,
    newest_version,
    plan_checkpoint,
)
from coordinator.ledger.records import Committed, Dropped, Record, SnapshotAdded, recorded
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.log_files import LogFiles, parts_of, seal, seq_of, unseal
from coordinator.model.errors import (
    CommitUnknownError,
    CorruptStateError,
    LogConflictError,
    StateReplacedError,
    StorageUnavailableError,
)
from coordinator.model.stored_json import check_format, check_place, from_json
from coordinator.runtime.runtime import Pool, random_id
from coordinator.storage.protocol import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL = 64
_APPEND_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Needed:
    """The files of a log that are needed to load it.

    Attributes
    ----------
    seq
        Sequence number of the second newest checkpoint that can be read with all its parts; 0 if there are not two.
    parts
        Parts that checkpoints from there on name; without two checkpoints, all that are there.
    """

    seq: int
    parts: Collection[str]


class ManifestLog(LogFiles):
    """Append-only records of one state.

    Parameters
    ----------
    checkpoint_interval
        Appends from one checkpoint to the next.
    part_records
        Commits and snapshots of a part of a checkpoint.
    """

    def __init__(
        self,
        store: ObjectStore,
        state_name: str,
        writer_id: str,
        *,
        new_id: Callable[[], str] = random_id,
        checkpoint_interval: int = CHECKPOINT_INTERVAL,
        part_records: int = PART_RECORDS,
        readers: Pool | None = None,
    ) -> None:
        super().__init__(store, state_name, new_id, readers)
        self._writer_id = writer_id
        self._checkpoint_interval = checkpoint_interval
        self._part_records = part_records
        #: Sequence number of the last record that was loaded or appended.
        self.seq = 0
        #: The newest checkpoint's contents; None while one is being written, and where none is known.
        self._written: Written | None = None
        self._since = Since(0)
        #: Identity of the last record that was loaded or appended; empty where it is not known.
        self._record_id = ""

    def load(self) -> StateLedger:
        """Return the ledger of the newest checkpoint, with everything after it folded in.

        Raises
        ------
        CorruptStateError
            A record is missing or unreadable, or another one than belongs there; the error names the file.
        NewerFormatError
            A later release wrote the log.
        """
        while True:
            checkpoints = self._store.list(f"{self._state_name}/checkpoints")
            try:
                return self._load_from(checkpoints)
            except CorruptStateError as error:
                if self._store.list(f"{self._state_name}/checkpoints")[-1:] == checkpoints[-1:]:
                    end = self._newest_drop()
                    if end is None:
                        raise
                    # What was before a state that was dropped is not needed, and its folder may have been deleted by hand.
                    return self._load_from((), end)
                # A slow reader finds that what it listed was cleaned away, because the log has gone on.
                log.warning(
                    "a newer checkpoint of the manifest log was written meanwhile; reading from that: %s", error
                )

    def _newest_drop(self) -> int | None:
        """Return the sequence number of the newest record that ended a state of this name; None if the log has none."""
        for info in reversed(self._store.list(f"{self._state_name}/manifest")):
            try:
                body = unseal(self._store.get(info.path))
                check_format(body, info.path)
                ends = any(isinstance(record, Dropped) for record in from_json(body["records"], list[Record]))
            except (FileNotFoundError, KeyError, TypeError, ValueError):
                return None
            if ends:
                self._former_ids = (*self._former_ids, body.get("state_id", ""))
                return seq_of(info.path)
        return None

    def _load_from(self, checkpoints: Sequence[ObjectInfo], first: int = 1) -> StateLedger:
        ledger, written, record_id = self._load_checkpoint(checkpoints)
        done = first - 1 if written is None else written.seq
        names = [info.path for info in self._store.list(f"{self._state_name}/manifest")]
        newest = max((seq_of(name) for name in names), default=0)
        since = Since(done)
        for path, body in self._read_all([self._path("manifest", seq) for seq in range(done + 1, newest + 1)]):
            try:
                check_place(body, {"seq": seq_of(path), "previous": record_id}, path)
                records = from_json(body["records"], list[Record])
                for record in records:
                    ledger.fold(record)
                record_id = body["record_id"]
            except (KeyError, TypeError, ValueError) as error:
                raise self._unreadable(path) from error
            since.add(body["seq"], records)
            if any(isinstance(record, Dropped) for record in records):
                written = None
        # Before any answer: the process that wrote the newest records may have died before they were durable.
        for folder in ("manifest", "checkpoints"):
            self._store.ensure_durable(f"{self._state_name}/{folder}")
        self.seq, self._written, self._since, self._record_id = max(done, newest), written, since, record_id
        return ledger

    def _load_checkpoint(self, checkpoints: Sequence[ObjectInfo]) -> tuple[StateLedger, Written | None, str]:
        """Return the newest ledger that can be read, its checkpoint's contents, and the id of the last record in it."""
        for info in reversed(checkpoints):
            try:
                return self._checkpoint_of(info.path)
            except CorruptStateError as error:
                if not self._has_record_of(info.path):
                    raise
                log.warning("a checkpoint of the manifest log is unreadable, reading from the one before: %s", error)
        return StateLedger(f"{self._store.uri}/{self._state_name}"), None, ""

    def _has_record_of(self, checkpoint: str) -> bool:
        """Return whether the record before a checkpoint is still in the log, so that the log is whole without the checkpoint."""
        try:
            self._store.get(checkpoint.replace("/checkpoints/", "/manifest/"))
        except FileNotFoundError:
            return False
        return True

    def check_file(self, path: str) -> None:
        """Read a file of the log, and compare it with its place and its neighbours.

        Raises
        ------
        CorruptStateError
            It is missing or unreadable, or another one than belongs there; the error names the file.
        NewerFormatError
            A later release wrote it.
        """
        if path.endswith("/metadata.json"):
            if self.load_metadata() is None:
                raise self._unreadable(path)
            return
        if "/checkpoints/" in path:
            self._checkpoint_of(path)
            return
        body = self._read(path)
        if "/manifest/" in path:
            seq = seq_of(path)
            check_place(body, {"seq": seq}, path)
            # A neighbour that is damaged is reported for itself.
            with suppress(FileNotFoundError, ValueError):
                before = unseal(self._store.get(self._path("manifest", seq - 1)))
                check_place(body, {"previous": before.get("record_id")}, path)

    def is_newest(self) -> bool:
        """Return whether no other writer has appended since this log was last loaded or appended to."""
        try:
            self._store.get(self._path("manifest", self.seq + 1))
        except FileNotFoundError:
            return True
        return False

    def end_remnants(self) -> bool:
        """End the state of a log without metadata of which nothing can be read; returns whether there was such a log."""
        folders = ("manifest", "checkpoints")
        numbers = {
            folder: [seq_of(info.path) for info in self._store.list(f"{self._state_name}/{folder}")]
            for folder in folders
        }
        if self.load_metadata() is not None or not any(numbers.values()):
            return False
        self.seq, self._record_id = max(seq for seqs in numbers.values() for seq in seqs), ""
        self.append([Dropped(None)])
        self._store.delete_all([self._path("checkpoints", seq) for seq in numbers["checkpoints"]])
        return True

    def is_current(self) -> bool:
        """Return whether the log ends with the record that was last loaded or appended here."""
        return self._has_last_record() and self.is_newest()

    def _has_last_record(self) -> bool:
        """Return whether the record that was last loaded or appended here is still where it was."""
        if not self.seq or not self._record_id:
            return True
        try:
            # Its id is nowhere else, and parsing all of a large record takes longer than reading it.
            return self._record_id.encode() in self._store.get(self._path("manifest", self.seq))
        except FileNotFoundError:
            return False

    def look(self, *, is_whole: bool) -> bool:
        """Return :meth:`is_newest`, of which a whole look is preceded by :meth:`check_replaced`."""
        if is_whole:
            self.check_replaced()
        return self.is_newest()

    def check_replaced(self) -> None:
        """Refuse to go on from the ledger in memory if the log is another one by now.

        Raises
        ------
        LogConflictError
            Other writers went on so far that the last record known here was cleaned away.
        StateReplacedError
            It is gone for no such reason: the state's folder was put back, replaced or deleted.
        """
        if self._has_last_record():
            return
        path = self._path("manifest", self.seq)
        if self.was_passed():
            raise LogConflictError("the log has gone on, and was cleaned since", file=path)
        raise StateReplacedError(
            "the state's files are not those that the fleet worked with: its folder was put back from a backup, replaced or deleted, "
            "or a record of its log was lost, while the fleet ran; nothing was counted and nothing was written; what is there now is "
            "read with the next call; stop the query, see `statefleet verify`, and put back folder and checkpoint of one time, or "
            "begin again with a new checkpoint and another name",
            state=self._state_name,
            file=path,
        )

    def was_passed(self) -> bool:
        """Return whether the log has gone on so far that records after the last known one may have been cleaned away.

        Cleaning leaves all after the second newest checkpoint (:func:`coordinator.ledger.cleaning_rules.prunable_records`), and
        checkpoints only become more. So while that one is older than this log's last record, no sequence number after it was ever
        freed, however long all of this took: a file that was put there is the log's, and one that was not found there never was.
        """
        checkpoints = [seq_of(info.path) for info in self._store.list(f"{self._state_name}/checkpoints")]
        return len(checkpoints) > 1 and self.seq <= sorted(checkpoints)[-2]

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether a checkpoint is due after the last record."""
        return self.seq % self._checkpoint_interval == 0

    def append(self, records: list[Record]) -> None:
        """Append records after the last one that is known here, if that is still there.

        Raises
        ------
        LogConflictError
            Another writer has the sequence number, or the log was cleaned since.
        StateReplacedError
            The log is another one by now.
        StorageUnavailableError
            The records are not in the log as far as can be read.
        CommitUnknownError
            They can be read there, but may not outlive a power loss.
        """
        # A free sequence number proves nothing: in an older copy, or in another state's log, it is free as well.
        self.check_replaced()
        seq = self.seq + 1
        record_id = self._new_id()
        body = {
            **self._facts(),
            "seq": seq,
            "previous": self._record_id,
            "writer_id": self._writer_id,
            "record_id": record_id,
            "records": list(map(recorded, records)),
        }
        self._put(self._path("manifest", seq), seal(body), record_id)
        self.seq, self._record_id = seq, record_id
        if any(isinstance(record, Dropped) for record in records):
            # No checkpoint goes on from parts of the dropped state.
            self._written = None
        self._since.add(seq, records)

    def _put(self, path: str, data: bytes, record_id: str) -> None:
        for _ in range(_APPEND_ATTEMPTS):
            try:
                if self._store.put_if_absent(path, data):
                    return
            except CommitUnknownError:
                log.warning("no clear answer to the append of %s; reading it back", path)
            # Taken, or unknown: the file that is there decides. This writer's own record means that only the reply was lost.
            try:
                stored = self._read_again(path)
            except FileNotFoundError:
                continue
            if stored["record_id"] != record_id:
                raise LogConflictError("another coordinator appended first", file=path, writer_id=stored["writer_id"])
            self._make_own_durable(path)
            return
        raise StorageUnavailableError(
            "the manifest log cannot be appended to; nothing was counted; retry when the object store is back",
            file=path,
        )

    def _make_own_durable(self, path: str) -> None:
        # That it can be read proves nothing: readers see contents that the disk may not have yet.
        try:
            self._store.ensure_durable(path)
        except StorageUnavailableError as error:
            raise CommitUnknownError(
                "a record of the manifest log can be read but may not outlive a power loss; no answer is given by it before it does; "
                "check the disk, then retry",
                file=path,
                cause=error,
            ) from error

    def _read_again(self, path: str) -> dict[str, Any]:
        try:
            return unseal(self._store.get(path))
        except ValueError as error:
            raise self._unreadable(path) from error

    def plan_checkpoint(self, ledger: StateLedger) -> CheckpointPlan:
        """Return the plan of a checkpoint of the ledger, which is as the last record left it. It is written before the next one
        is planned.
        """
        plan = plan_checkpoint(self.seq, ledger, self._written, self._since, self._part_records)
        plan = replace(plan, record_id=self._record_id)
        # Set by write_checkpoint: if that fails, it is not known which files are there, and the next checkpoint is written whole.
        self._written, self._since = None, self._since.after(self.seq)
        return plan

    def write_checkpoint(self, plan: CheckpointPlan) -> None:
        """Store a ledger, so that loading reads little. Nothing depends on it, and it may take long."""
        try:
            parts = (
                *plan.parts,
                *(self._put_part(plan.seq, records) for records in in_parts(plan, self._part_records)),
            )
            body = {
                **self._facts(),
                "seq": plan.seq,
                "record_id": plan.record_id,
                "folded": plan.folded,
            }
            if parts:
                body["parts"] = parts
            if self._store.put_if_absent(self._path("checkpoints", plan.seq), seal(body)):
                self._written = Written(plan.seq, parts, plan.rest)
        except (CommitUnknownError, StorageUnavailableError) as error:
            log.warning("no checkpoint of the manifest log this time (loading will read more): %s", error)

    def _put_part(self, seq: int, records: tuple[Committed | SnapshotAdded, ...]) -> Part:
        # No other file has its name: another coordinator may make other parts at the same sequence number.
        file = f"{self._state_name}/parts/{seq:020d}-{self._new_id()}.json"
        self._store.put(file, seal({**self._facts(), "file": file, "records": list(map(recorded, records))}))
        return Part(file, len(records), newest_version(records))

    def needed(self, infos: Iterable[ObjectInfo]) -> Needed:
        """Return which of the listed files are needed to load the log."""
        paths = {info.path for info in infos}
        whole: list[int] = []
        parts: set[str] = set()
        for path in sorted((path for path in paths if "/checkpoints/" in path), reverse=True):
            try:
                named = {part.file for part in parts_of(self._read(path))}
            except (CorruptStateError, KeyError, TypeError, ValueError):
                # Unreadable, so of no use.
                continue
            parts |= named
            if named <= paths:
                whole.append(seq_of(path))
            if len(whole) == 2:
                return Needed(whole[1], parts)
        return Needed(0, paths)
