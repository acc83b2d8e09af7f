"""Object storage: a few operations, of which put-if-absent decides who committed.

- :mod:`coordinator.storage.local` (``file://``): a temporary file, fsync, and a hard link to the final name, which the file system
  creates or refuses atomically. Own code because obstore's local store does not fsync, and a commit must survive power loss.
- :mod:`coordinator.storage.remote` (``s3://``, ``gs://``, ``az://``): obstore, the one maintained Python library with
  conditional puts on all three clouds and no further dependencies.
- :mod:`coordinator.storage.memory`: tests and simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["ObjectInfo", "ObjectStore"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object: path relative to the store's URI, size in bytes, last change in seconds since the epoch."""

    path: str
    size: int
    modified_s: float


class ObjectStore(Protocol):
    """Immutable objects by path. Thread-safe."""

    uri: str

    @property
    def tells_writers_apart(self) -> bool:
        """Whether `put_if_absent` holds between two processes; if not, the user has promised that there is only one."""

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create an object durably; False if one is there already.

        The object that is there may be the caller's own: the reply of a first attempt can be lost. Callers that must know put an id of
        their own into `data` and read the object back.

        Raises
        ------
        CommitUnknownError
            No answer says whether the object was created: read it back before anything else.
        StorageUnavailableError
            The store failed and certainly created nothing.
        """

    def put(self, path: str, data: bytes) -> None:
        """Write an object durably under a name that no other writer uses."""

    def ensure_durable(self, path: str) -> None:
        """Make an object, or all objects of a folder (not of those below it), outlive a power loss if they can be read.

        Called before this process relies on an object that it read and did not write itself: its writer may have failed, or died,
        between making it visible and making it durable. Nothing happens if there is no such object, or in stores where it is
        durable once visible.

        Raises
        ------
        StorageUnavailableError
            It may still not be durable; what was read must not be relied on yet.
        """

    def get(self, path: str) -> bytes:
        """Return the whole content; FileNotFoundError if there is no object. It may not be durable yet: :meth:`ensure_durable`."""

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return the objects whose path starts with the folder `prefix`, sorted by path."""

    def list_unfinished(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return the unfinished files below a folder, of killed and of live writers; `delete` removes them."""

    def delete(self, path: str) -> None:
        """Remove an object; nothing happens if there is none."""

    def delete_all(self, paths: Sequence[str]) -> None:
        """Remove objects, in as few requests as the store takes, some at once.

        Raises
        ------
        StorageUnavailableError
            The store failed; some of them may be deleted.
        """

    def folders(self) -> Sequence[str]:
        """Return the names of the top folders that have objects, sorted."""
