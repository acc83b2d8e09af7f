"""The manifest log of one state in object storage.

``<state>/manifest/<seq>.json`` (20 digits, from 1, no gaps) holds the records of one append; each is created with put-if-absent,
so of two coordinators that believe themselves in office only one gets a place, and the other learns what was decided
meanwhile. ``<state>/checkpoints/<seq>.json`` is the ledger after that append, so that loading reads little; of a large ledger most is
in ``<state>/parts/`` (:mod:`coordinator.ledger.checkpoints`).
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    part_body,
    plan_checkpoint,
    records_of_part,
)
from coordinator.ledger.records import Committed, Dropped, Record, SnapshotAdded, record_from_json, record_to_json
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import (
    CommitUnknownError,
    CorruptStateError,
    LogConflictError,
    StateReplacedError,
    StorageUnavailableError,
)
from coordinator.model.file_format import FORMAT, check_format, check_place
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Pool, random_id
from coordinator.storage.protocol import ObjectInfo, ObjectStore

__all__ = ["CHECKPOINT_INTERVAL", "ManifestLog", "Needed", "place_of", "seal", "unseal"]

log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL = 64
_APPEND_ATTEMPTS = 4
#: Files that are on their way while one is used.
_READ_AHEAD = 16
#: Of a log file's JSON, down to which depth it is encoded piece by piece: to the entries of a ledger.
_DEPTH = 3
#: How an object begins that was sealed with sorted keys.
_SEALED = b'{"checksum": '


def seal(body: dict[str, Any], *, sort_keys: bool = False) -> bytes:
    """Bytes of a JSON object with a checksum of all its other fields.

    Parameters
    ----------
    sort_keys
        Write it as the checksum sees it, with the checksum in front: quicker to write, and to read.
    """
    if sort_keys and body:
        pieces = [piece.encode() for piece in _pieces(body, sort_keys=True)]
        # The first piece opens the object.
        return b"".join([_SEALED, b"%d, " % _crc(pieces), pieces[0][1:], *pieces[1:]])
    return "".join(_pieces({**body, "checksum": _checksum(body)})).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """The object of :func:`seal`; ValueError if a byte of it has changed."""
    body: Any = json.loads(data)
    checksum = body.pop("checksum", None) if isinstance(body, dict) else None
    if checksum is None or (_sorted_checksum(data) != checksum and _checksum(body) != checksum):
        raise ValueError("the checksum differs")
    return dict(body)


def _sorted_checksum(data: bytes) -> int | None:
    """What the checksum of an object has to be if its bytes are those of a sorted one; None if it does not look so."""
    end = data.find(b", ", len(_SEALED))
    return _crc([b"{", data[end + 2 :]]) if data.startswith(_SEALED) and end > 0 else None


def _checksum(body: dict[str, Any]) -> int:
    return _crc(piece.encode() for piece in _pieces(body, sort_keys=True))


def _crc(pieces: Iterable[bytes]) -> int:
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _pieces(value: Any, *, sort_keys: bool = False, depth: int = _DEPTH) -> Iterator[str]:
    """What ``json.dumps`` gives, in pieces: for a whole ledger in one it would keep the interpreter to itself for seconds."""
    if depth and value and isinstance(value, dict):
        items = sorted(value.items()) if sort_keys else value.items()
        for place, (key, item) in enumerate(items):
            yield f"{', ' if place else '{'}{json.dumps(key)}: "
            yield from _pieces(item, sort_keys=sort_keys, depth=depth - 1)
        yield "}"
    elif depth and value and isinstance(value, list):
        for place, item in enumerate(value):
            yield ", " if place else "["
            yield from _pieces(item, sort_keys=sort_keys, depth=depth - 1)
        yield "]"
    else:
        yield json.dumps(value, sort_keys=sort_keys)


def place_of(path: str) -> int:
    """Sequence number of a record or a checkpoint, by its path."""
    return int(path.rpartition("/")[2].removesuffix(".json"))


@dataclass(frozen=True, slots=True)
class Needed:
    """What of a log is needed by whoever loads it.

    Attributes
    ----------
    seq
        Place of the second newest checkpoint that can be read with all its parts; 0 if there are not two.
    parts
        Parts that checkpoints from there on name; without two checkpoints, whatever is there.
    """

    seq: int
    parts: Collection[str]


def _parts_of(checkpoint: dict[str, Any]) -> tuple[Part, ...]:
    return tuple(Part(**part) for part in checkpoint.get("parts", ()))


def _records_of_ledger(ledger: dict[str, Any]) -> tuple[Committed | SnapshotAdded, ...]:
    """Commits and snapshots that a checkpoint has itself."""
    entries = (Committed(CommitEntry.from_json(one)) for one in ledger["entries"])
    return (*entries, *(SnapshotAdded(SnapshotEntry.from_json(one)) for one in ledger["snapshots"]))


class ManifestLog:
    """Append-only records of one state.

    Parameters
    ----------
    store
        The fleet's object store.
    state_name
        Folder of the state.
    writer_id
        Who writes, for the reader of a record.
    new_id
        Makes the ids by which a writer knows its own records.
    checkpoint_interval
        Appends from one checkpoint to the next.
    part_records
        Commits and snapshots of a part of a checkpoint.
    readers
        Threads that read files side by side; one after the other without.
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
        self._store = store
        self._state_name = state_name
        self._writer_id = writer_id
        self._new_id = new_id
        self._checkpoint_interval = checkpoint_interval
        self._part_records = part_records
        self._readers = readers
        self._seq = 0
        #: What the newest checkpoint was made of; None while one is on its way, and where none is known.
        self._written: Written | None = None
        self._since = Since(0)

        #: Identity of the state, and that of the last record that was loaded or appended; empty where they are not known.
        self._state_id = ""
        self._former_ids: tuple[str, ...] = ()
        self._record_id = ""

    def _path(self, folder: str, seq: int) -> str:
        return f"{self._state_name}/{folder}/{seq:020d}.json"

    def load(self) -> StateLedger:
        """Fold the newest checkpoint and everything after it.

        Raises
        ------
        CorruptStateError
            A record is missing or unreadable, or another one than belongs there; names the file.
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
                # Whoever reads slowly finds that what was listed is cleaned away, and that the log has gone on.
                log.warning(
                    "a newer checkpoint of the manifest log was written meanwhile; reading from that: %s", error
                )

    def _newest_drop(self) -> int | None:
        """Place of the newest record by which a state of this name ended; None if the log has none."""
        for info in reversed(self._store.list(f"{self._state_name}/manifest")):
            try:
                body = unseal(self._store.get(info.path))
                check_format(body, info.path)
                ends = any(isinstance(record_from_json(record), Dropped) for record in body["records"])
            except (FileNotFoundError, KeyError, TypeError, ValueError):
                return None
            if ends:
                self._former_ids = (*self._former_ids, body.get("state_id", ""))
                return place_of(info.path)
        return None

    def _load_from(self, checkpoints: Sequence[ObjectInfo], first: int = 1) -> StateLedger:
        ledger, written, record_id = self._load_checkpoint(checkpoints)
        done = first - 1 if written is None else written.seq
        names = [info.path for info in self._store.list(f"{self._state_name}/manifest")]
        newest = max((place_of(name) for name in names), default=0)
        since = Since(done)
        for path, body in self._read_all([self._path("manifest", seq) for seq in range(done + 1, newest + 1)]):
            try:
                check_place(body, {"seq": place_of(path), "previous": record_id}, path)
                records = [record_from_json(record) for record in body["records"]]
                for record in records:
                    ledger.fold(record)
                record_id = body["record_id"]
            except (KeyError, TypeError, ValueError) as error:
                raise self._unreadable(path) from error
            since.add(body["seq"], records)
            if any(isinstance(record, Dropped) for record in records):
                written = None
        # Before anything is told by it: who wrote the newest records may have died before they were durable.
        for folder in ("manifest", "checkpoints"):
            self._store.ensure_durable(f"{self._state_name}/{folder}")
        self._seq, self._written, self._since, self._record_id = max(done, newest), written, since, record_id
        return ledger

    def _load_checkpoint(self, checkpoints: Sequence[ObjectInfo]) -> tuple[StateLedger, Written | None, str]:
        """The newest ledger that can be read, what its checkpoint was made of, and the id of the last record in it."""
        for info in reversed(checkpoints):
            try:
                return self._checkpoint_of(info.path)
            except CorruptStateError as error:
                if not self._has_record_of(info.path):
                    raise
                log.warning("a checkpoint of the manifest log is unreadable, reading from the one before: %s", error)
        return StateLedger(f"{self._store.uri}/{self._state_name}"), None, ""

    def _checkpoint_of(self, path: str) -> tuple[StateLedger, Written, str]:
        data = self._read(path)
        try:
            check_place(data, {"seq": place_of(path)}, path)
            # Releases that know format 1 only find no ledger in later ones, and do not go on from a part of what they say.
            folded = data["folded" if "format" in data else "ledger"]
            parts = _parts_of(data)
            earlier = self._records_of(parts) if parts else None
            ledger = StateLedger.from_json(f"{self._store.uri}/{self._state_name}", folded, earlier)
            rest = _records_of_ledger(folded) if parts else ()
            record_id = data.get("record_id", "")
            self._check_record_of(path, record_id)
            return ledger, Written(int(data["seq"]), parts, rest), record_id
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._unreadable(path) from error

    def _check_record_of(self, checkpoint: str, record_id: str) -> None:
        """Compare a checkpoint with the record that it was made after, if that is there and whole.

        One of a backup from which the state had gone on in another way is of the same state, and has the same number.
        """
        if not record_id:
            return
        record = checkpoint.replace("/checkpoints/", "/manifest/")
        try:
            body = self._read(record)
            check_place(body, {"seq": place_of(record)}, record)
        except CorruptStateError:
            return  # cleaned away, or damaged itself
        check_place({"record_id": record_id}, {"record_id": body["record_id"]}, checkpoint)

    def _records_of(self, parts: Sequence[Part]) -> Iterator[Committed | SnapshotAdded]:
        for part, (path, body) in zip(parts, self._read_all([part.file for part in parts]), strict=True):
            try:
                yield from records_of_part(body, part)
            except (KeyError, TypeError, ValueError) as error:
                raise self._unreadable(path) from error

    def check_file(self, path: str) -> None:
        """Read a file of the log and compare what it says with its place and its neighbours.

        Raises
        ------
        CorruptStateError
            It is missing or unreadable, or another one than belongs there; names the file.
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
            seq = place_of(path)
            check_place(body, {"seq": seq}, path)
            # One that is damaged itself is named for itself.
            with suppress(FileNotFoundError, ValueError):
                before = unseal(self._store.get(self._path("manifest", seq - 1)))
                check_place(body, {"previous": before.get("record_id")}, path)

    def _read_all(self, paths: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Files in their order, the next ones on their way while one is used."""
        if self._readers is None:
            yield from ((path, self._read(path)) for path in paths)
            return
        waiting = deque(self._readers.submit(self._read, path) for path in paths[:_READ_AHEAD])
        for place, path in enumerate(paths):
            body = waiting.popleft().result()
            if place + _READ_AHEAD < len(paths):
                waiting.append(self._readers.submit(self._read, paths[place + _READ_AHEAD]))
            yield path, body

    def _has_record_of(self, checkpoint: str) -> bool:
        """Whether the record that a checkpoint was made after is still in the log, so that the log can do without it."""
        try:
            self._store.get(checkpoint.replace("/checkpoints/", "/manifest/"))
        except FileNotFoundError:
            return False
        return True

    def _read(self, path: str) -> dict[str, Any]:
        try:
            body = unseal(self._store.get(path))
        except (FileNotFoundError, ValueError) as error:
            raise self._unreadable(path) from error
        check_format(body, path)
        # Who writes beside a drop may know of another state of the name: what follows what is told by the records' own ids.
        state_id = "" if self._former_ids else self._state_id
        check_place(body, {"state": self._state_name, "state_id": state_id, "file": path}, path)
        return body

    def _unreadable(self, path: str) -> CorruptStateError:
        return CorruptStateError(
            "a record of the manifest log is missing or unreadable; no version can be trusted without it; nothing was "
            "changed; restore the file from a backup of the object store",
            file=path,
            state=self._state_name,
        )

    def is_newest(self) -> bool:
        """Whether nobody has appended since this log was last loaded or appended to."""
        try:
            self._store.get(self._path("manifest", self._seq + 1))
        except FileNotFoundError:
            return True
        return False

    def end_remnants(self) -> bool:
        """Say in a log without metadata, of which nothing can be read, that its state is no more; whether there was such a log."""
        folders = ("manifest", "checkpoints")
        places = {
            one: [place_of(info.path) for info in self._store.list(f"{self._state_name}/{one}")] for one in folders
        }
        if self.load_metadata() is not None or not any(places.values()):
            return False
        self._seq, self._record_id = max(place for some in places.values() for place in some), ""
        self.append([Dropped(None)])
        self._store.delete_all([self._path("checkpoints", place) for place in places["checkpoints"]])
        return True

    def is_current(self) -> bool:
        """Whether the log ends with the record that was last loaded or appended here, and that one is still the same."""
        return self._has_last_record() and self.is_newest()

    def _has_last_record(self) -> bool:
        """Whether the record that was last loaded or appended here is still where it was."""
        if not self._seq or not self._record_id:
            return True
        try:
            # Its id is nowhere else; to parse all of a large record takes longer than to read it.
            return self._record_id.encode() in self._store.get(self._path("manifest", self._seq))
        except FileNotFoundError:
            return False

    def look(self, *, is_whole: bool) -> bool:
        """:meth:`is_newest`, of which a whole look is preceded by :meth:`check_replaced`."""
        if is_whole:
            self.check_replaced()
        return self.is_newest()

    def check_replaced(self) -> None:
        """Refuse to go on from what is in memory if the log is another one by now.

        Raises
        ------
        LogConflictError
            Others went on so far that the last record known here was cleaned away.
        StateReplacedError
            It is not there any more for no such reason: somebody put the state's folder back, replaced or deleted it.
        """
        if self._has_last_record():
            return
        path = self._path("manifest", self._seq)
        if self.was_passed():
            raise LogConflictError("the log has gone on, and was cleaned since", file=path)
        raise StateReplacedError(
            "the state's files are not those that the fleet worked with: its folder was put back from a backup, replaced or deleted, "
            "or a record of its log was lost, while the fleet ran; nothing was counted and nothing was written; what is there now is "
            "read with the next call; stop the query, see `statefleet verify`, and put back folder and checkpoint of one time, or "
            "begin anew with a new checkpoint and another name",
            state=self._state_name,
            file=path,
        )

    def was_passed(self) -> bool:
        """Whether the log has gone on so far that records from this place on may have been cleaned away.

        Cleaning leaves all after the second newest checkpoint (:func:`coordinator.ledger.cleaning_rules.prunable_records`), and
        checkpoints only become more. So while that one is older than this log's last record, the places after it were never
        freed, however long all of this took: what was put there is the log's, and what was not found there was not there.
        """
        checkpoints = [place_of(info.path) for info in self._store.list(f"{self._state_name}/checkpoints")]
        return len(checkpoints) > 1 and self._seq <= sorted(checkpoints)[-2]

    @property
    def seq(self) -> int:
        """Place of the last record that was loaded or appended."""
        return self._seq

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether the ledger after the last record is to be written down."""
        return self._seq % self._checkpoint_interval == 0

    def append(self, records: list[Record]) -> None:
        """Append records, after the last one that is known here if that is still there.

        Raises
        ------
        LogConflictError
            The place is taken by another writer, or the log was cleaned since.
        StateReplacedError
            The log is another one by now.
        StorageUnavailableError
            The records are not in the log as far as can be read.
        CommitUnknownError
            They can be read there, but may not outlive a power loss.
        """
        # A free place says nothing of what it follows: of an older copy, or of another state, it is free as well.
        self.check_replaced()
        seq = self._seq + 1
        record_id = self._new_id()
        told = [record_to_json(record) for record in records]
        body = {
            **self._facts(),
            "seq": seq,
            "previous": self._record_id,
            "writer_id": self._writer_id,
            "record_id": record_id,
            "records": told,
        }
        self._put(self._path("manifest", seq), seal(body), record_id)
        self._seq, self._record_id = seq, record_id
        if any(isinstance(record, Dropped) for record in records):
            # No checkpoint goes on from parts of the former state.
            self._written = None
        self._since.add(seq, records)

    def _facts(self) -> dict[str, Any]:
        """What every file of the log says of itself."""
        return {"format": FORMAT, "state": self._state_name, "state_id": self._state_id}

    def _put(self, path: str, data: bytes, record_id: str) -> None:
        for _ in range(_APPEND_ATTEMPTS):
            try:
                if self._store.put_if_absent(path, data):
                    return
            except CommitUnknownError:
                log.warning("no clear answer to the append of %s; reading it back", path)
            # Taken, or unknown: what is there decides. One's own record means only the reply was lost.
            try:
                found = self._read_again(path)
            except FileNotFoundError:
                continue
            if found["record_id"] != record_id:
                raise LogConflictError("another coordinator appended first", file=path, writer_id=found["writer_id"])
            self._make_own_durable(path)
            return
        raise StorageUnavailableError(
            "the manifest log cannot be appended to; nothing was counted; retry when the object store is back",
            file=path,
        )

    def _make_own_durable(self, path: str) -> None:
        # That it can be read is no proof: a reader is shown what the disk may not have.
        try:
            self._store.ensure_durable(path)
        except StorageUnavailableError as error:
            raise CommitUnknownError(
                "a record of the manifest log can be read but may not outlive a power loss; nobody is told of it before it does; "
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
        """What is to be written of the ledger, which is as the last record left it; it is carried out before the next is planned."""
        plan = plan_checkpoint(self._seq, ledger, self._written, self._since, self._part_records)
        plan = replace(plan, record_id=self._record_id)
        # What this one does not make known: where it fails, nobody knows which files are there, and the next one is written anew.
        self._written, self._since = None, self._since.after(self._seq)
        return plan

    def write_checkpoint(self, plan: CheckpointPlan) -> None:
        """Store a ledger, so that loading reads little; nothing depends on it, and it may take its time."""
        try:
            parts = (
                *plan.parts,
                *(self._put_part(plan.seq, records) for records in in_parts(plan, self._part_records)),
            )
            body = {
                **self._facts(),
                "seq": plan.seq,
                "record_id": plan.record_id,
                "folded": plan.ledger.to_json(),
            }
            if parts:
                body["parts"] = [part.to_json() for part in parts]
            if self._store.put_if_absent(self._path("checkpoints", plan.seq), seal(body)):
                self._written = Written(plan.seq, parts, plan.rest)
        except (CommitUnknownError, StorageUnavailableError) as error:
            log.warning("no checkpoint of the manifest log this time (loading will read more): %s", error)

    def _put_part(self, seq: int, records: tuple[Committed | SnapshotAdded, ...]) -> Part:
        # Its name is nobody else's: another coordinator may make other parts at the same place of the log.
        file = f"{self._state_name}/parts/{seq:020d}-{self._new_id()}.json"
        self._store.put(file, seal({**self._facts(), "file": file, **part_body(records)}, sort_keys=True))
        return Part(file, len(records), newest_version(records))

    def needed(self, infos: Iterable[ObjectInfo]) -> Needed:
        """What loading needs of the files of the log's folders, as they were listed."""
        there = {info.path for info in infos}
        whole: list[int] = []
        parts: set[str] = set()
        for path in sorted((path for path in there if "/checkpoints/" in path), reverse=True):
            try:
                named = {part.file for part in _parts_of(self._read(path))}
            except (CorruptStateError, KeyError, TypeError, ValueError):
                # It is of no use to anybody.
                continue
            parts |= named
            if named <= there:
                whole.append(place_of(path))
            if len(whole) == 2:
                return Needed(whole[1], parts)
        return Needed(0, there)

    def load_metadata(self) -> StateMetadata | None:
        """The state's fixed facts; None if the state does not exist.

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
        """Remove the fixed facts of a state that the log says is no more; those of another one of its name stay."""
        found = self.load_metadata()
        if found is not None and dropped is not None and found.state_id == dropped.get("state_id", ""):
            self._store.delete(f"{self._state_name}/metadata.json")
        self._state_id = ""

    def restore_metadata(self, metadata: StateMetadata) -> None:
        """Write the fixed facts anew that the log has and the file is lost of."""
        path = f"{self._state_name}/metadata.json"
        with suppress(CommitUnknownError):  # whoever opens the state next looks again
            if self._store.put_if_absent(path, seal(metadata.to_json())):
                log.warning("the metadata of a state were lost, and were written anew from its log: %s", path)
        self._state_id, self._former_ids = metadata.state_id, metadata.former_ids

    def create_metadata(self, metadata: StateMetadata, dropped: Mapping[str, Any] | None = None) -> StateMetadata:
        """Write the fixed facts once, with an id of the state; returns those that are there (another's, if that was first).

        Parameters
        ----------
        dropped
            Those of the state of this name that is no more.
        """
        path = f"{self._state_name}/metadata.json"
        former: tuple[str, ...] = ()
        if dropped is not None:
            former = (*dropped.get("former_ids", ()), dropped.get("state_id", ""))
            self.remove_metadata(dropped)
        created = replace(metadata, format_version=FORMAT, state_id=self._new_id(), former_ids=former)
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
