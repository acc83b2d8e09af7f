"""Objects as files of a folder, durable once they are there."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

from coordinator.errors import CommitUnknownError, StorageUnavailableError
from coordinator.storage.protocol import ObjectInfo

__all__ = ["LocalObjectStore"]

_TEMPORARY_PREFIX = ".tmp-"


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
