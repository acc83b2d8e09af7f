"""Checks, before a fleet starts, that its object store supports commits, and that all its processes see the same storage."""

from __future__ import annotations

import logging
import re
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from coordinator.model.errors import (
    CommitUnknownError,
    InvalidRequestError,
    SetupError,
    StateStoreError,
    StorageUnavailableError,
)
from coordinator.model.identities import ActorLocation
from coordinator.runtime.runtime import Lock
from coordinator.storage.options import PREFIXES
from coordinator.storage.protocol import ObjectStore

log = logging.getLogger(__name__)

#: Names of the objects that a store actor and the coordinator write for each other, in a folder named as `_FOLDER`.
_FROM_STORE, _FROM_COORDINATOR = "from-store-actor", "from-coordinator"
_FOLDER = re.compile(r"_probe/[0-9a-f]{32}")

#: Number of races between two writers in a probe.
_RACES = 3


def probe(store: ObjectStore) -> None:
    """Check that the store can be written, and that its put-if-absent refuses a second writer, also a simultaneous one.

    Raises
    ------
    StorageUnavailableError
        The store cannot be written, or does not refuse; the message says which, and what to do.
    """
    folder = f"_probe/{uuid.uuid4().hex}"
    try:
        fault = _fault(store, folder)
    except (OSError, CommitUnknownError) as error:
        raise StorageUnavailableError(
            "the object store cannot be used; check that it exists and may be written", uri=store.uri, cause=error
        ) from error
    _remove_all(store, folder)
    if fault is not None:
        raise fault


def _fault(store: ObjectStore, folder: str) -> StorageUnavailableError | None:
    """Return an error if a store that can be written has no put-if-absent that works; None if it has."""
    try:
        is_exclusive = _refuses_a_second(store, f"{folder}/second")
        if is_exclusive and store.tells_writers_apart:
            is_exclusive = all(_one_racer_wins(store, f"{folder}/race-{number}") for number in range(_RACES))
    except StateStoreError as error:
        if not _takes_plain_put(store, f"{folder}/plain"):
            raise
        return _without_conditions("fails at", store, cause=error)
    return None if is_exclusive else _without_conditions("ignores", store)


def _refuses_a_second(store: ObjectStore, path: str) -> bool:
    store.put_if_absent(path, b"first")
    return not store.put_if_absent(path, b"second") and store.get(path) == b"first"


def _one_racer_wins(store: ObjectStore, path: str) -> bool:
    bodies = [b"left", b"right"]
    start = threading.Barrier(len(bodies))

    def race(body: bytes) -> bool:
        start.wait()
        return store.put_if_absent(path, body)

    with ThreadPoolExecutor(len(bodies)) as pool:
        won = list(pool.map(race, bodies))
    # If the winner's first reply was lost, it also believes that it lost the race. There are never two winners.
    return all(not is_first or store.get(path) == body for is_first, body in zip(won, bodies, strict=True)) and not all(
        won
    )


def _takes_plain_put(store: ObjectStore, path: str) -> bool:
    try:
        store.put(path, b"plain")
    except StateStoreError:
        return False
    return True


def _without_conditions(verb: str, store: ObjectStore, **context: object) -> StorageUnavailableError:
    advice = "use another server or bucket"
    # Only buckets have the option, and the advice is useless if it is set already.
    if store.uri.partition(":")[0] in PREFIXES and store.tells_writers_apart:
        advice += (
            " or, if only one fleet of this URI ever runs at a time and you accept the risk, "
            "storage_options={'single_writer': 'true'}"
        )
    return StorageUnavailableError(
        f"the object store can be written but {verb} put-if-absent (If-None-Match: *), so it cannot tell two writers apart and "
        f"commits would be lost; nothing was started; {advice}",
        uri=store.uri,
        **context,
    )


def time_of_store(store: ObjectStore) -> float:
    """Return the time of an object store's clock, in seconds since the epoch: the modification time of an object written now.

    Raises
    ------
    StorageUnavailableError
        The store failed.
    """
    path = f"_probe/{uuid.uuid4().hex}/time"
    store.put(path, b"")
    try:
        return max(info.modified_s for info in store.list(path.rpartition("/")[0]))
    except ValueError:
        raise StorageUnavailableError(
            "the object store does not list what was just written, so the age of files is not known; nothing was deleted",
            uri=store.uri,
            file=path,
        ) from None
    finally:
        store.delete(path)


def remove_left_over(store: ObjectStore, grace_s: float) -> None:
    """Delete the objects of probes and proofs whose processes were killed.

    Parameters
    ----------
    grace_s
        Seconds; a younger object may belong to a running process.
    """
    try:
        now_s = time_of_store(store)
        for info in (*store.list("_probe"), *store.list_unfinished("_probe")):
            if now_s - info.modified_s > grace_s:
                store.delete(info.path)
    except (OSError, StateStoreError) as error:
        log.warning("objects of former start-up probes stay behind in %s/_probe: %s", store.uri, error)


def _remove_all(store: ObjectStore, folder: str) -> None:
    try:
        for info in store.list(folder):
            store.delete(info.path)
    except (OSError, StateStoreError) as error:
        log.warning("objects of a start-up probe stay behind in %s/%s: %s", store.uri, folder, error)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The coordinator's reply in a proof that it and a store actor see the same storage."""

    #: Content of the store actor's object; None if the coordinator sees no such object.
    received: str | None
    answer: str
    #: Where the coordinator runs, for messages.
    process: str


def look_into(store: ObjectStore, folder: str, process: str) -> ProbeResult:
    """Read a store actor's object and write a reply, as the coordinator's part of :func:`prove_shared`; may be repeated.

    Raises
    ------
    InvalidRequestError
        The folder is not a folder of a proof.
    StorageUnavailableError
        The store failed.
    """
    if _FOLDER.fullmatch(folder) is None:
        raise InvalidRequestError("this is no folder of a proof; nothing was written", folder=folder)
    try:
        text = store.get(f"{folder}/{_FROM_STORE}").decode(errors="replace")
    except FileNotFoundError:
        return ProbeResult(None, "", process)
    answer = uuid.uuid4().hex
    store.put(f"{folder}/{_FROM_COORDINATOR}", answer.encode())
    return ProbeResult(text, answer, process)


def prove_shared(store: ObjectStore, look: Callable[[str], ProbeResult], process: str) -> None:
    """Check that this process and the coordinator see the same storage: each reads what the other has just written.

    One URI can name two storages: a folder on the disk of each node, or a bucket of the same name on two servers.

    Parameters
    ----------
    look
        Calls the coordinator's :func:`look_into` with a folder.

    Raises
    ------
    SetupError
        They see different storage; the error names both processes and what to do.
    StorageUnavailableError
        The store failed.
    """
    folder, challenge = f"_probe/{uuid.uuid4().hex}", uuid.uuid4().hex
    store.put(f"{folder}/{_FROM_STORE}", challenge.encode())
    try:
        result = look(folder)
        try:
            answer = store.get(f"{folder}/{_FROM_COORDINATOR}").decode(errors="replace")
        except FileNotFoundError:
            answer = None
    finally:
        _remove_all(store, folder)
    if result.received != challenge or answer != result.answer:
        raise SetupError(
            "a store actor and the coordinator have the same URI and see different storage, so what one writes the others could not "
            "read; nothing was written to any state; use storage that every node reaches: s3://, gs:// or az://, or for file:// a "
            "folder that is mounted from one place (NFS) on every node, at the same path",
            uri=store.uri,
            store_actor=process,
            coordinator=result.process,
        )


@dataclass(eq=False)
class StorageProof:
    """A proof that each incarnation of an actor makes once, as Ray may restart an actor on another node. Thread-safe.

    Its lock is one that nothing else uses.
    """

    _objects: ObjectStore
    _look_into: Callable[[str], ProbeResult]
    _location: ActorLocation
    _lock: Lock
    _is_proven: bool = False

    def check(self) -> None:
        """Make the proof, unless it was made before.

        Raises
        ------
        SetupError
            The coordinator sees other storage.
        StorageUnavailableError
            The storage cannot be used.
        """
        with self._lock:
            if not self._is_proven:
                actor = self._location
                prove_shared(self._objects, self._look_into, f"pid {actor.pid} on {actor.host}, node {actor.node_id}")
                self._is_proven = True
