"""An object store in memory that records its requests, and lets a test wait or fail before each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.storage.protocol import ObjectInfo
from tests.memory_store import MemoryObjectStore


class ObservedObjectStore(MemoryObjectStore):
    """Objects in memory, with a record of the requests.

    Attributes
    ----------
    requests
        Operation (``put``, ``put_if_absent``, ``get``, ``list``, ``delete_all``) and path of each request so far, in order.
    before
        Called with operation and path before a request is recorded and carried out; an error that it raises is the request's.
    """

    def __init__(self, before: Callable[[str, str], None] = lambda operation, path: None) -> None:
        super().__init__()
        self.requests: list[tuple[str, str]] = []
        self.before = before

    def count(self, operation: str) -> int:
        """Return the number of requests of a kind so far."""
        return sum(kind == operation for kind, _ in self.requests)

    def _record(self, operation: str, path: str) -> None:
        self.before(operation, path)
        self.requests.append((operation, path))

    def put(self, path: str, data: bytes) -> None:
        self._record("put", path)
        super().put(path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self._record("put_if_absent", path)
        return super().put_if_absent(path, data)

    def get(self, path: str) -> bytes:
        self._record("get", path)
        return super().get(path)

    def list(self, prefix: str) -> list[ObjectInfo]:
        self._record("list", prefix)
        return super().list(prefix)

    def delete_all(self, paths: Sequence[str]) -> None:
        self._record("delete_all", " ".join(paths))
        super().delete_all(paths)
