"""Objects as files in a folder, which survive a power loss once they are written.

The steps that make them durable are, in this order: the names of new folders (``fsync`` of the folders above), a file's content
(``fsync`` of the file), and its name (``fsync`` of its folder). A file gets its name once its content is durable, so every file with
a name is complete.
Three cases need care:

- Another thread, or a process that died before it could sync, may have created a folder a moment ago. So each process syncs the path
  to a folder once itself, before it first returns a file of it.
- A name that can be read may not be durable: its writer died, or its sync failed. A process that relies on what it read calls
  :meth:`LocalObjectStore.ensure_durable` first.
- A sync that failed is repeated. For names the repetition is conclusive: a file system that cannot write its journal goes on
  failing. For content it is not (Linux drops the pages), so content is written again, as a new file.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coordinator.model.errors import CommitUnknownError, StorageUnavailableError
from coordinator.storage.protocol import ObjectInfo

_TEMPORARY_PREFIX = ".tmp-"


class LocalObjectStore:
    """Objects as files below a folder.

    Parameters
    ----------
    root
        Absolute folder. The first write creates it, readable by its user only, as state is as private as its input rows. An existing
        folder keeps its permissions.
    calls
        The functions of module ``os`` that make files durable. Tests give others.
    """

    tells_writers_apart = True

    def __init__(self, root: Path, calls: Any = os) -> None:
        self.uri = f"file://{root}"
        self._root = root
        self._calls = calls
        #: Device and inode of each folder whose name this process has made durable. A folder that was created again has another inode.
        self._durable: dict[Path, tuple[int, int]] = {}

    def put_if_absent(self, path: str, data: bytes) -> bool:
        target = self._root / path
        temporary = self._write_temporary(target, data)
        try:
            self._calls.link(temporary, target)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._failed(target, error) from error
        finally:
            self._drop(temporary)
        try:
            self._sync(target.parent)
        except OSError as error:
            raise CommitUnknownError(
                "a file was created but may not outlive a power loss; read it back, and have it made durable before it counts",
                file=target,
                cause=error,
            ) from error
        return True

    def put(self, path: str, data: bytes) -> None:
        target = self._root / path
        temporary = self._write_temporary(target, data)
        try:
            self._calls.replace(temporary, target)
            self._sync(target.parent)
        except OSError as error:
            self._drop(temporary)
            raise self._failed(target, error) from error

    def ensure_durable(self, path: str) -> None:
        target = self._root / path
        folder = target if target.is_dir() else target.parent
        if not folder.is_dir():
            return
        try:
            self._make_folder(folder)
            self._sync(folder)
        except OSError as error:
            raise StorageUnavailableError(
                "whether files that can be read outlive a power loss is not known; nothing that rests on them is answered; check "
                "the disk, then retry",
                folder=folder,
                cause=error,
            ) from error

    def get(self, path: str) -> bytes:
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed(self._root / path, error) from error

    def list(self, prefix: str) -> list[ObjectInfo]:
        infos = [info for info in self._walk(prefix) if not _is_temporary(info.path)]
        return sorted(infos, key=lambda info: info.path)

    def list_unfinished(self, prefix: str) -> Sequence[ObjectInfo]:
        return tuple(info for info in self._walk(prefix) if _is_temporary(info.path))

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        def stop(error: OSError) -> None:
            # An unreadable folder must not look like an empty one; a missing one is empty.
            if not isinstance(error, FileNotFoundError):
                raise self._failed(self._root / prefix, error) from error

        for folder, _, names in os.walk(self._root / prefix, onerror=stop):
            for name in names:
                file = Path(folder, name)
                with suppress(FileNotFoundError):  # deleted since it was listed
                    status = file.stat()
                    yield ObjectInfo(str(file.relative_to(self._root)), status.st_size, status.st_mtime)

    def delete(self, path: str) -> None:
        try:
            (self._root / path).unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(self._root / path, error) from error

    def delete_all(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.delete(path)

    def folders(self) -> Sequence[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self._root) if entry.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed(self._root, error) from error

    def _write_temporary(self, target: Path, data: bytes) -> Path:
        """Write a file beside the target, with durable content, and return its path."""
        temporary = target.parent / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            self._make_folder(target.parent)
            descriptor = self._calls.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                remaining = memoryview(data)
                while remaining:  # Linux writes 2 GiB at most in one call
                    remaining = remaining[self._calls.write(descriptor, remaining) :]
                self._calls.fsync(descriptor)
            finally:
                self._calls.close(descriptor)
        except OSError as error:
            self._drop(temporary)
            raise self._failed(target, error) from error
        return temporary

    def _drop(self, temporary: Path) -> None:
        # If this fails, cleaning removes the file.
        with suppress(OSError):
            self._calls.unlink(temporary)

    def _make_folder(self, folder: Path) -> None:
        """Create a folder if needed, and make its name and the names of the folders above it durable."""
        identity = self._identity(folder)
        if identity is not None and self._durable.get(folder) == identity:
            return
        if identity is not None and identity[0] != self._parent_device(folder):
            return  # the root of a file system has no name in one
        self._make_folder(folder.parent)
        if identity is None:
            with suppress(FileExistsError):
                self._calls.mkdir(folder, 0o700 if folder == self._root else 0o777)
        try:
            self._sync(folder.parent)
        except PermissionError:
            # Folders above the root, such as /home, may be unreadable. This process has created nothing in those.
            if identity is None or not self._root.is_relative_to(folder):
                raise
        current = self._identity(folder)
        if current is not None:
            self._durable[folder] = current

    def _identity(self, folder: Path) -> tuple[int, int] | None:
        try:
            status = self._calls.stat(folder)
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{folder} is not a folder")
        return status.st_dev, status.st_ino

    def _parent_device(self, folder: Path) -> int | None:
        """Return the device of the folder above; None above ``/``."""
        return None if folder.parent == folder else self._calls.stat(folder.parent).st_dev

    def _sync(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        descriptor = self._calls.open(folder, os.O_RDONLY)
        try:
            self._calls.fsync(descriptor)
        finally:
            self._calls.close(descriptor)

    @staticmethod
    def _failed(path: Path, error: OSError) -> StorageUnavailableError:
        return StorageUnavailableError(
            "a file of the object store cannot be read or written; what was committed is untouched; check the folder's "
            "permissions and free space",
            file=path,
            cause=error,
        )


def _is_temporary(path: str) -> bool:
    return path.rpartition("/")[2].startswith(_TEMPORARY_PREFIX)
