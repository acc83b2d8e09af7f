"""The object store protocol: a few operations, of which put-if-absent decides which writer has committed.

- :mod:`coordinator.storage.local` (``file://``): a temporary file, fsync, and a hard link to the final name, which the file system
  creates or refuses atomically. It does not use obstore, whose local store does not fsync: a commit must survive power loss.
- :mod:`coordinator.storage.remote` (``s3://``, ``gs://``, ``az://``): obstore, the one maintained Python library with
  conditional puts on all three clouds and no further dependencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object: its path relative to the store's URI, its size in bytes, and its last change in seconds since the epoch."""

    path: str
    size: int
    modified_s: float


class ObjectStore(Protocol):
    """Immutable objects by path. Thread-safe."""

    uri: str

    @property
    def tells_writers_apart(self) -> bool:
        """Whether `put_if_absent` works between two processes; if not, the user has promised that there is only one writer."""

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create an object durably; return False if an object with this path exists.

        The existing object may be the caller's own, as the reply to a first attempt can be lost. A caller that must know puts a unique
        id into `data` and reads the object back.

        Raises
        ------
        CommitUnknownError
            It is not known whether the object was created: the caller must read it back first.
        StorageUnavailableError
            The store failed and certainly created nothing.
        """

    def put(self, path: str, data: bytes) -> None:
        """Write an object durably under a name that no other writer uses."""

    def ensure_durable(self, path: str) -> None:
        """Make an object durable, so that it survives a power loss; of a folder, all objects directly in it.

        A process calls this before it relies on an object that another process wrote: the writer may have failed or died after the
        object became visible and before it was durable. The method does nothing if there is no such object, or if the store's
        objects are durable once visible.

        Raises
        ------
        StorageUnavailableError
            The object may not be durable; the caller must not rely on what it read yet.
        """

    def get(self, path: str) -> bytes:
        """Return the whole content; raise FileNotFoundError if there is no object. See :meth:`ensure_durable` for its durability."""

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return the objects whose path starts with the folder `prefix`, sorted by path."""

    def list_unfinished(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return the unfinished files of killed and live writers below a folder; `delete` removes them."""

    def delete(self, path: str) -> None:
        """Remove an object; nothing happens if there is none."""

    def delete_all(self, paths: Sequence[str]) -> None:
        """Remove objects, in as few requests as the store allows, some of them in parallel.

        Raises
        ------
        StorageUnavailableError
            The store failed; some of the objects may be deleted.
        """

    def folders(self) -> Sequence[str]:
        """Return the names of the top folders that have objects, sorted."""
