"""Objects in a dict, for tests and simulation."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from coordinator.storage.protocol import ObjectInfo


class MemoryObjectStore:
    """Stores objects in a dict; for tests and simulation."""

    uri = "memory://"
    tells_writers_apart = True

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._modified_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self._lock:
            if path in self._objects:
                return False
            self._objects[path], self._modified_s[path] = data, time.time()
            return True

    def put(self, path: str, data: bytes) -> None:
        with self._lock:
            self._objects[path], self._modified_s[path] = data, time.time()

    def ensure_durable(self, path: str) -> None:
        """Do nothing: an object that can be read is as durable as it will be."""

    def get(self, path: str) -> bytes:
        with self._lock:
            if path not in self._objects:
                raise FileNotFoundError(path)
            return self._objects[path]

    def list(self, prefix: str) -> list[ObjectInfo]:
        folder = prefix.rstrip("/") + "/" if prefix else ""
        with self._lock:
            return [
                ObjectInfo(key, len(self._objects[key]), self._modified_s[key])
                for key in sorted(self._objects)
                if key.startswith(folder)
            ]

    def list_unfinished(self, prefix: str) -> Sequence[ObjectInfo]:
        return ()

    def delete(self, path: str) -> None:
        with self._lock:
            self._objects.pop(path, None)

    def delete_all(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.delete(path)

    def folders(self) -> Sequence[str]:
        with self._lock:
            return sorted({path.partition("/")[0] for path in self._objects if "/" in path})
