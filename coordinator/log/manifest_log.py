"""The manifest log of one state in object storage: what is fixed about the state, the log's records, and checkpoints of them.

A checkpoint, ``<state>/checkpoints/<seq>.json``, is the ledger after an append, so that loading reads little; of a large ledger most is
in ``<state>/parts/`` (:mod:`coordinator.ledger.checkpoints`). What is fixed about the state is in ``<state>/metadata.json``. Records
are appended by :class:`~coordinator.log.log_end.LogEnd`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from coordinator.ledger.checkpoints import (
    PART_RECORDS,
    CheckpointPlan,
    Part,
    Since,
    Written,
    in_parts,
    newest_version,
    plan_checkpoint,
    records_of_part,
)
from coordinator.ledger.history_changes import records_of
from coordinator.ledger.records import Committed, Dropped, Record, SnapshotAdded, recorded
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.log_end import LogEnd, seal, seq_of, unseal
from coordinator.model.errors import CommitUnknownError, CorruptStateError, StorageUnavailableError
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.stored_json import FORMAT, check_format, check_place, from_json
from coordinator.runtime.runtime import Pool, random_id
from coordinator.storage.protocol import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL = 64
#: Files that are being fetched while one is used.
_READ_AHEAD = 16


def parts_of(checkpoint: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts that a checkpoint names."""
    return from_json(checkpoint.get("parts", ()), tuple[Part, ...])


@dataclass(frozen=True, slots=True)
class Needed:
    """The files of a log that are needed to load it."""

    #: Sequence number of the second newest checkpoint that can be read with all its parts; 0 if there are not two.
    seq: int
    #: Parts that checkpoints from there on name; without two checkpoints, all that are there.
    parts: Collection[str]


class ManifestLog(LogEnd):
    """Append-only records of one state.

    Parameters
    ----------
    checkpoint_interval
        Appends from one checkpoint to the next.
    part_records
        Commits and snapshots of a part of a checkpoint.
    readers
        Threads that read files side by side; without them one is read after the other.
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
        super().__init__(store, state_name, writer_id, new_id)
        self._checkpoint_interval = checkpoint_interval
        self._part_records = part_records
        self._readers = readers

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

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether a checkpoint is due after the last record."""
        return self.seq % self._checkpoint_interval == 0

    def _checkpoint_of(self, path: str) -> tuple[StateLedger, Written, str]:
        data = self._read(path)
        try:
            check_place(data, {"seq": seq_of(path)}, path)
            folded = data["folded"]
            parts = parts_of(data)
            earlier = self._records_of(parts) if parts else None
            ledger = StateLedger.from_json(f"{self._store.uri}/{self._state_name}", folded, earlier)
            rest = records_of(folded) if parts else ()
            record_id = data.get("record_id", "")
            self._check_record_of(path, record_id)
            return ledger, Written(int(data["seq"]), parts, rest), record_id
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._unreadable(path) from error

    def _check_record_of(self, checkpoint: str, record_id: str) -> None:
        """Compare a checkpoint with the record that it was made after, if that is there and whole.

        A checkpoint of a backup, after which the state went another way, belongs to the same state and has the same number.
        """
        if not record_id:
            return
        record = checkpoint.replace("/checkpoints/", "/manifest/")
        try:
            body = self._read(record)
            check_place(body, {"seq": seq_of(record)}, record)
        except CorruptStateError:
            return  # cleaned away, or damaged itself
        check_place({"record_id": record_id}, {"record_id": body["record_id"]}, checkpoint)

    def _records_of(self, parts: Sequence[Part]) -> Iterator[Committed | SnapshotAdded]:
        for part, (path, body) in zip(parts, self._read_all([part.file for part in parts]), strict=True):
            try:
                yield from records_of_part(body, part)
            except (KeyError, TypeError, ValueError) as error:
                raise self._unreadable(path) from error

    def _read_all(self, paths: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield files in their order; the next ones are being fetched while one is used."""
        if self._readers is None:
            yield from ((path, self._read(path)) for path in paths)
            return
        waiting = deque(self._readers.submit(self._read, path) for path in paths[:_READ_AHEAD])
        for index, path in enumerate(paths):
            body = waiting.popleft().result()
            if index + _READ_AHEAD < len(paths):
                waiting.append(self._readers.submit(self._read, paths[index + _READ_AHEAD]))
            yield path, body

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

    # -- metadata -------------------------------------------------------------------------------------------------

    def load_metadata(self) -> StateMetadata | None:
        """Return the state's metadata; None if the state does not exist.

        Raises
        ------
        CorruptStateError
            The file is unreadable, or another state's.
        NewerFormatError
            A later release wrote it.
        """
        path = f"{self._state_name}/metadata.json"
        try:
            data = self._store.get(path)
        except FileNotFoundError:
            self._state_id, self._former_ids = "", ()
            return None
        self._store.ensure_durable(path)
        try:
            facts = unseal(data)
            check_format(facts, path, "format_version")
            check_place(facts, {"state_name": self._state_name}, path)
            metadata = StateMetadata.from_json(facts)
        except (KeyError, TypeError, ValueError) as error:
            raise self._unreadable(path) from error
        self._state_id, self._former_ids = metadata.state_id, metadata.former_ids
        return metadata

    def remove_metadata(self, dropped: Mapping[str, Any] | None) -> None:
        """Remove the metadata of a state that the log says was dropped; that of another state of its name stays."""
        stored = self.load_metadata()
        if stored is not None and dropped is not None and stored.state_id == dropped.get("state_id", ""):
            self._store.delete(f"{self._state_name}/metadata.json")
        self._state_id = ""

    def restore_metadata(self, metadata: StateMetadata) -> None:
        """Write the metadata file again from the log's copy, after the file was lost."""
        path = f"{self._state_name}/metadata.json"
        with suppress(CommitUnknownError):  # the next one that opens the state looks again
            if self._store.put_if_absent(path, seal(metadata.to_json())):
                log.warning("the metadata of a state were lost, and were written again from its log: %s", path)
        self._state_id, self._former_ids = metadata.state_id, metadata.former_ids

    def create_metadata(self, metadata: StateMetadata, dropped: Mapping[str, Any] | None = None) -> StateMetadata:
        """Write the metadata once, with an id of the state; returns the metadata that is there (another writer's, if that was first).

        Parameters
        ----------
        dropped
            Metadata of the dropped state of this name.
        """
        path = f"{self._state_name}/metadata.json"
        former: tuple[str, ...] = ()
        if dropped is not None:
            former = (*dropped.get("former_ids", ()), dropped.get("state_id", ""))
            self.remove_metadata(dropped)
        created = structs.replace(metadata, format_version=FORMAT, state_id=self._new_id(), former_ids=former)
        try:
            if self._store.put_if_absent(path, seal(created.to_json())):
                self._state_id, self._former_ids = created.state_id, created.former_ids
                return created
        except CommitUnknownError:
            log.warning("no clear answer to the creation of %s; reading it back", path)
        existing = self.load_metadata()
        if existing is None:
            raise StorageUnavailableError("the state's metadata cannot be written; nothing was changed", file=path)
        return existing
