"""Object storage: five operations, of which put-if-absent decides who committed.

- :class:`LocalObjectStore` (``file://``): a temporary file, fsync, and a hard link to the final name, which the file system
  creates or refuses atomically. Own code because obstore's local store does not fsync, and a commit must survive power loss.
- :class:`RemoteObjectStore` (``s3://``, ``gs://``, ``az://``): obstore, the one maintained Python library with
  conditional puts on all three clouds and no further dependencies.
- :class:`MemoryObjectStore`: tests and simulation.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from coordinator.errors import CommitUnknownError, InvalidRequestError, StorageUnavailableError

__all__ = [
    "LocalObjectStore",
    "MemoryObjectStore",
    "ObjectInfo",
    "ObjectStore",
    "RemoteObjectStore",
    "normalize_uri",
    "open_object_store",
    "probe",
]

_SCHEMES = ("file", "s3", "gs", "az")
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
_TEMPORARY_PREFIX = ".tmp-"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object: path relative to the store's URI, size in bytes, last change in seconds since the epoch."""

    path: str
    size: int
    modified_s: float


class ObjectStore(Protocol):
    """Immutable objects by path. Thread-safe."""

    uri: str

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create an object durably; False if one is there already.

        Raises
        ------
        CommitUnknownError
            No answer says whether the object was created.
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
    return RemoteObjectStore.open(normalized, storage_options)


def probe(store: ObjectStore) -> None:
    """Prove that the store can be written and that its put-if-absent refuses a second writer.

    Raises
    ------
    StorageUnavailableError
        It can't, or it doesn't.
    """
    path = f"_probe/{uuid.uuid4().hex}"
    try:
        first = store.put_if_absent(path, b"first")
        second = store.put_if_absent(path, b"second")
        content = store.get(path)
        store.delete(path)
    except (OSError, CommitUnknownError) as error:
        raise StorageUnavailableError(
            "the object store cannot be used; check that it exists and may be written", uri=store.uri, cause=error
        ) from error
    if not first or second or content != b"first":
        raise StorageUnavailableError(
            "the object store overwrites on put-if-absent, so it cannot tell two writers apart; use a store with conditional "
            "puts (If-None-Match)",
            uri=store.uri,
        )


class LocalObjectStore:
    """Objects as files below a folder.

    Parameters
    ----------
    root
        Absolute folder; made when first written.
    """

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


class RemoteObjectStore:
    """Objects in a bucket, through obstore.

    Parameters
    ----------
    uri
        Normalised URI.
    store
        An obstore store whose root is the URI.
    """

    #: A 409 of S3 means "two writers at this moment": nothing may have landed, so the put is tried again this often.
    _ATTEMPTS = 5

    def __init__(self, uri: str, store: Any) -> None:
        self.uri = uri
        self._store = store

    @classmethod
    def open(cls, uri: str, storage_options: Mapping[str, str] | None) -> RemoteObjectStore:
        """Store of a bucket; credentials come from the usual environment unless the options have them."""
        # Late: obstore's runtime threads must not exist before a process forks.
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        try:
            return cls(uri, from_url(uri, config=dict(storage_options or {})))  # type: ignore[call-overload]
        except (BaseError, ValueError) as error:
            raise InvalidRequestError(
                "the object store's options are not usable; see obstore's names for this scheme", uri=uri
            ) from error

    def put_if_absent(self, path: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        for attempt in range(self._ATTEMPTS):
            try:
                obstore.put(self._store, path, data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                # Also raised for S3's 409, after which there may be no object at all.
                if self._exists(path):
                    return False
                time.sleep(0.05 * 2**attempt)
            except BaseError as error:
                raise CommitUnknownError(
                    "a conditional put got no clear answer; it may have landed: read it back", path=path, cause=error
                ) from error
            else:
                return True
        raise CommitUnknownError("conditional puts keep conflicting and no object appears", path=path)

    def _exists(self, path: str) -> bool:
        import obstore
        from obstore.exceptions import BaseError

        try:
            obstore.head(self._store, path)
        except FileNotFoundError:
            return False
        except BaseError as error:
            raise CommitUnknownError("a refused put cannot be read back", path=path, cause=error) from error
        return True

    def put(self, path: str, data: bytes) -> None:
        import obstore
        from obstore.exceptions import BaseError

        try:
            obstore.put(self._store, path, data)
        except BaseError as error:
            raise self._failed(path, error) from error

    def get(self, path: str) -> bytes:
        import obstore
        from obstore.exceptions import BaseError

        try:
            return bytes(obstore.get(self._store, path).bytes())
        except FileNotFoundError:
            raise
        except BaseError as error:
            raise self._failed(path, error) from error

    def list(self, prefix: str) -> list[ObjectInfo]:
        import obstore
        from obstore.exceptions import BaseError

        infos = []
        try:
            for page in obstore.list(self._store, prefix):
                infos += [ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in page]
        except BaseError as error:
            raise self._failed(prefix, error) from error
        return sorted(infos, key=lambda info: info.path)

    def delete(self, path: str) -> None:
        import obstore
        from obstore.exceptions import BaseError

        try:
            obstore.delete(self._store, path)
        except FileNotFoundError:
            return
        except BaseError as error:
            raise self._failed(path, error) from error

    @staticmethod
    def _failed(path: str, error: Exception) -> StorageUnavailableError:
        return StorageUnavailableError(
            "the object store failed; what was committed is untouched; retry when it is back", path=path, cause=error
        )


class MemoryObjectStore:
    """Objects in a dict; for tests and simulation."""

    uri = "memory://"

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
