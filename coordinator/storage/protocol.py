"""Object storage: five operations, of which put-if-absent decides who committed.

- :class:`LocalObjectStore` (``file://``): a temporary file, fsync, and a hard link to the final name, which the file system
  creates or refuses atomically. Own code because obstore's local store does not fsync, and a commit must survive power loss.
- :mod:`coordinator.storage.remote` (``s3://``, ``gs://``, ``az://``): obstore, the one maintained Python library with
  conditional puts on all three clouds and no further dependencies.
- :class:`MemoryObjectStore`: tests and simulation.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from coordinator.errors import CommitUnknownError, InvalidRequestError, StateStoreError, StorageUnavailableError

__all__ = [
    "LocalObjectStore",
    "MemoryObjectStore",
    "ObjectInfo",
    "ObjectStore",
    "normalize_uri",
    "open_object_store",
    "probe",
]

log = logging.getLogger(__name__)

_SCHEMES = ("file", "s3", "gs", "az")
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
_TEMPORARY_PREFIX = ".tmp-"
#: Races of two writers in a probe.
_RACES = 3


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object: path relative to the store's URI, size in bytes, last change in seconds since the epoch."""

    path: str
    size: int
    modified_s: float


class ObjectStore(Protocol):
    """Immutable objects by path. Thread-safe."""

    uri: str
    #: Whether `put_if_absent` holds between two processes; else the user has promised that there is one.
    tells_writers_apart: bool

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create an object durably; False if one is there already.

        The one that is there may be one's own: the reply of a first attempt can be lost. Callers who must know put an id of
        their own into `data` and read back.

        Raises
        ------
        CommitUnknownError
            No answer says whether the object was created: read it back before anything else.
        StorageUnavailableError
            The store failed and certainly created nothing.
        """

    def put(self, path: str, data: bytes) -> None:
        """Write an object durably under a name that nobody else uses."""

    def get(self, path: str) -> bytes:
        """Whole content; FileNotFoundError if it isn't there."""

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Objects whose path starts with the folder `prefix`, sorted by path."""

    def delete(self, path: str) -> None:
        """Remove an object; nothing happens if it isn't there."""


def normalize_uri(uri: str) -> str:
    """Canonical form of a fleet's URI: known scheme, aliases resolved, no trailing slash.

    Raises
    ------
    InvalidRequestError
        No scheme, a scheme that is not supported, a relative ``file`` path or no bucket.
    """
    parts = urlsplit(uri)
    if parts.password is not None:
        raise InvalidRequestError(
            "a fleet's URI holds no password; credentials belong in the environment", scheme=parts.scheme
        )
    scheme = _ALIASES.get(parts.scheme, parts.scheme)
    if scheme not in _SCHEMES:
        raise InvalidRequestError(
            "a fleet's URI needs one of the schemes file, s3 (or s3a), gs, az, such as file:///var/lib/statefleet or "
            "s3://bucket/prefix",
            uri=uri,
        )
    if parts.query or parts.fragment:
        raise InvalidRequestError("a fleet's URI has no '?' or '#' (write %3F or %23 in a file path)", uri=uri)
    path = parts.path.rstrip("/")
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or not path.startswith("/"):
            raise InvalidRequestError("a file URI needs an absolute path: file:///folder", uri=uri)
        return f"file://{os.path.normpath(path)}"
    if not parts.netloc:
        raise InvalidRequestError(f"the URI names no bucket: {scheme}://bucket/prefix (or use file:///folder)", uri=uri)
    return f"{scheme}://{parts.netloc}{path}"


def open_object_store(uri: str, storage_options: Mapping[str, str] | None = None) -> ObjectStore:
    """Store of a URI.

    Raises
    ------
    InvalidRequestError
        The URI's scheme is not supported or its options are not known.
    """
    normalized = normalize_uri(uri)
    if normalized.startswith("file://"):
        store = LocalObjectStore(Path(unquote(urlsplit(normalized).path)))
        store.uri = normalized
        return store
    # Late: that module builds on this one.
    from coordinator.storage.remote import open_remote_store

    return open_remote_store(normalized, storage_options)


def probe(store: ObjectStore) -> None:
    """Prove that the store can be written and that its put-if-absent refuses a second writer, also one at the same moment.

    Raises
    ------
    StorageUnavailableError
        It can't, or it doesn't; the message says which, and what to do.
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
    """What is wrong with a store that can be written."""
    try:
        apart = _refuses_a_second(store, f"{folder}/second")
        if apart and store.tells_writers_apart:
            apart = all(_one_racer_wins(store, f"{folder}/race-{number}") for number in range(_RACES))
    except StateStoreError as error:
        if not _takes_plain_put(store, f"{folder}/plain"):
            raise
        return _without_conditions("fails at", store, cause=error)
    return None if apart else _without_conditions("ignores", store)


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
    # With a lost reply the winner, too, believes that another was first; two winners there never are.
    return all(not one or store.get(path) == body for one, body in zip(won, bodies, strict=True)) and not all(won)


def _takes_plain_put(store: ObjectStore, path: str) -> bool:
    try:
        store.put(path, b"plain")
    except StateStoreError:
        return False
    return True


def _without_conditions(verb: str, store: ObjectStore, **context: object) -> StorageUnavailableError:
    advice = "use another server or bucket"
    if not store.uri.startswith("file:"):
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


def _remove_all(store: ObjectStore, folder: str) -> None:
    try:
        for info in store.list(folder):
            store.delete(info.path)
    except (OSError, StateStoreError) as error:
        log.warning("objects of a start-up probe stay behind in %s/%s: %s", store.uri, folder, error)


class LocalObjectStore:
    """Objects as files below a folder.

    Parameters
    ----------
    root
        Absolute folder; made when first written.
    """

    tells_writers_apart = True

    def __init__(self, root: Path) -> None:
        self.uri = f"file://{root}"
        self._root = root

    def put_if_absent(self, path: str, data: bytes) -> bool:
        target = self._root / path
        temporary = self._write_temporary(target, data)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._failed(target, error) from error
        finally:
            temporary.unlink(missing_ok=True)
        try:
            self._sync_folder(target.parent)
        except OSError as error:
            raise CommitUnknownError(
                "a file was created but may not outlive a power loss; read it back", file=target, cause=error
            ) from error
        return True

    def put(self, path: str, data: bytes) -> None:
        target = self._root / path
        temporary = self._write_temporary(target, data)
        try:
            temporary.replace(target)
            self._sync_folder(target.parent)
        except OSError as error:
            raise self._failed(target, error) from error

    def get(self, path: str) -> bytes:
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed(self._root / path, error) from error

    def list(self, prefix: str) -> list[ObjectInfo]:
        def stop(error: OSError) -> None:
            # An unreadable folder must not look like an empty one; a missing one is empty.
            if not isinstance(error, FileNotFoundError):
                raise self._failed(self._root / prefix, error) from error

        infos = []
        for folder, _, names in os.walk(self._root / prefix, onerror=stop):
            for name in names:
                if name.startswith(_TEMPORARY_PREFIX):
                    continue
                file = Path(folder, name)
                with suppress(FileNotFoundError):  # deleted since it was listed
                    stat = file.stat()
                    infos.append(ObjectInfo(str(file.relative_to(self._root)), stat.st_size, stat.st_mtime))
        return sorted(infos, key=lambda info: info.path)

    def delete(self, path: str) -> None:
        try:
            (self._root / path).unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(self._root / path, error) from error

    def _write_temporary(self, target: Path, data: bytes) -> Path:
        temporary = target.parent / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            if not target.parent.is_dir():
                missing = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
                target.parent.mkdir(parents=True, exist_ok=True)
                for folder in missing:
                    self._sync_folder(folder.parent)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            # The first failure is the one to tell; where no file can be made, none can be removed either.
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise self._failed(target, error) from error
        return temporary

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        # A new name is durable once its folder is.
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @staticmethod
    def _failed(path: Path, error: OSError) -> StorageUnavailableError:
        return StorageUnavailableError(
            "a file of the object store cannot be read or written; what was committed is untouched; check the folder's "
            "permissions and free space",
            file=path,
            cause=error,
        )


class MemoryObjectStore:
    """Objects in a dict; for tests and simulation."""

    uri = "memory://"
    tells_writers_apart = True

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self._lock:
            if path in self._objects:
                return False
            self._objects[path] = data
            return True

    def put(self, path: str, data: bytes) -> None:
        with self._lock:
            self._objects[path] = data

    def get(self, path: str) -> bytes:
        with self._lock:
            if path not in self._objects:
                raise FileNotFoundError(path)
            return self._objects[path]

    def list(self, prefix: str) -> list[ObjectInfo]:
        folder = prefix.rstrip("/") + "/" if prefix else ""
        with self._lock:
            return [
                ObjectInfo(key, len(self._objects[key]), 0.0) for key in sorted(self._objects) if key.startswith(folder)
            ]

    def delete(self, path: str) -> None:
        with self._lock:
            self._objects.pop(path, None)
