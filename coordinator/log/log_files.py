"""The files of one state's log in object storage: their names, their contents, and whether they are what belongs there.

The ledger of a checkpoint is in ``<state>/checkpoints/<seq>.json``; of a large ledger most is in ``<state>/parts/``
(:mod:`coordinator.ledger.checkpoints`). What is fixed about the state is in ``<state>/metadata.json``.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import structs

from coordinator.ledger.checkpoints import Part, Written, records_of_part
from coordinator.ledger.history_changes import records_of
from coordinator.ledger.records import Committed, SnapshotAdded
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.errors import CommitUnknownError, CorruptStateError, StorageUnavailableError
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.stored_json import FORMAT, check_format, check_place, from_json
from coordinator.runtime.runtime import Pool
from coordinator.storage.protocol import ObjectStore

#: Beginning of a sealed object.
_SEALED = b'{"checksum": '
log = logging.getLogger(__name__)

#: Files that are being fetched while one is used.
_READ_AHEAD = 16


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


def parts_of(checkpoint: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts that a checkpoint names."""
    return from_json(checkpoint.get("parts", ()), tuple[Part, ...])


class LogFiles:
    """Reads the files of one state's log, compares each with its place, and writes the state's metadata.

    Parameters
    ----------
    readers
        Threads that read files side by side; without them one is read after the other.
    """

    def __init__(self, store: ObjectStore, state_name: str, new_id: Callable[[], str], readers: Pool | None) -> None:
        self._store = store
        self._state_name = state_name
        self._new_id = new_id
        self._readers = readers
        #: Identity of the state; empty where it is not known.
        self._state_id = ""
        #: Identities of the dropped states of this name.
        self._former_ids: tuple[str, ...] = ()

    def _path(self, folder: str, seq: int) -> str:
        return f"{self._state_name}/{folder}/{seq:020d}.json"

    def _facts(self) -> dict[str, Any]:
        return {"format": FORMAT, "state": self._state_name, "state_id": self._state_id}

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
