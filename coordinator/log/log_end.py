"""The end of one state's log in object storage: the form of its files, appends, and whether the log has gone on elsewhere.

``<state>/manifest/<seq>.json`` (20 digits, from 1, no gaps) has the records of one append. Each file is created with
put-if-absent: of two coordinators that both take themselves for the fleet's only one gets a sequence number, and the other one
learns what was decided meanwhile.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from coordinator.ledger.checkpoints import Since, Written
from coordinator.ledger.records import Dropped, Record, recorded
from coordinator.model.errors import (
    CommitUnknownError,
    CorruptStateError,
    LogConflictError,
    StateReplacedError,
    StorageUnavailableError,
)
from coordinator.model.stored_json import FORMAT, check_format, check_place
from coordinator.storage.protocol import ObjectStore

#: Beginning of a sealed object.
_SEALED = b'{"checksum": '
_APPEND_ATTEMPTS = 4

log = logging.getLogger(__name__)


def seal(body: dict[str, Any]) -> bytes:
    """Return a JSON object as bytes. Its first field is a checksum of the bytes that it has without that field."""
    data = msgspec.json.encode(body)
    return b"%s%d, %s" % (_SEALED, zlib.crc32(data), memoryview(data)[1:])


def unseal(data: bytes) -> dict[str, Any]:
    """Return the object that :func:`seal` was given.

    Raises
    ------
    ValueError
        A byte of it has changed.
    """
    body: Any = msgspec.json.decode(data)
    checksum = body.pop("checksum", None) if isinstance(body, dict) else None
    if checksum is None or (checksum != _checksum(data) and checksum != _checksum_of_fields(body)):
        raise ValueError("the checksum differs")
    fields: dict[str, Any] = body
    return fields


def _checksum(data: bytes) -> int | None:
    """Return the checksum that a sealed object has to have, by its bytes; None if these do not begin as one."""
    end = data.find(b", ", len(_SEALED))
    return zlib.crc32(memoryview(data)[end + 2 :], zlib.crc32(b"{")) if data.startswith(_SEALED) and end > 0 else None


def _checksum_of_fields(body: dict[str, Any]) -> int:
    """Return the checksum of an object whose fields are in another order, or that was written before this form was."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def seq_of(path: str) -> int:
    """Return the sequence number of a record or a checkpoint, by its path."""
    return int(path.rpartition("/")[2].removesuffix(".json"))


class LogEnd:
    """The log up to the last record that was loaded or appended here, to which records are appended."""

    def __init__(self, store: ObjectStore, state_name: str, writer_id: str, new_id: Callable[[], str]) -> None:
        self._store = store
        self._state_name = state_name
        self._writer_id = writer_id
        self._new_id = new_id
        #: Identity of the state; empty where it is not known.
        self._state_id = ""
        #: Identities of the dropped states of this name.
        self._former_ids: tuple[str, ...] = ()
        #: Sequence number of the last record that was loaded or appended.
        self.seq = 0
        #: Identity of the last record that was loaded or appended; empty where it is not known.
        self._record_id = ""
        #: The newest checkpoint's contents; None while one is being written, and where none is known.
        self._written: Written | None = None
        self._since = Since(0)

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

    def is_newest(self) -> bool:
        """Return whether no other writer has appended since this log was last loaded or appended to."""
        try:
            self._store.get(self._path("manifest", self.seq + 1))
        except FileNotFoundError:
            return True
        return False

    # -- files ----------------------------------------------------------------------------------------------------

    def _path(self, folder: str, seq: int) -> str:
        return f"{self._state_name}/{folder}/{seq:020d}.json"

    def _facts(self) -> dict[str, Any]:
        return {"format": FORMAT, "state": self._state_name, "state_id": self._state_id}

    def _read(self, path: str) -> dict[str, Any]:
        try:
            body = unseal(self._store.get(path))
        except (FileNotFoundError, ValueError) as error:
            raise self._unreadable(path) from error
        check_format(body, path)
        # A coordinator that writes beside a drop may know of another state of the name: the records' own ids say what follows what.
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
