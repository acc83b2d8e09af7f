"""A disk that loses power: the system calls that write files, and what is left of the files afterwards.

The visible files are in a real folder. Beside it is a model of what the disk has: the content of each file at its last sync, and the
names in each folder at its last sync. Everything else may be there after a power loss or not, independently for each name.
"""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

#: Which of the names that were not synced are there after a power loss: none, all, or each by chance.
KEEPS = ("none", "all", "some")

#: Kind of thing that a sync makes durable: the content of a file, the names of files in a folder, or those of folders in a folder.
Sync = str


class PowerLoss(BaseException):
    """The machine is off: nothing runs, not even the handling of errors."""


@dataclass(eq=False)
class _File:
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass(eq=False)
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)


class LosingDisk:
    """System calls on a disk that can lose power, for :class:`coordinator.storage.local.LocalObjectStore`.

    Parameters
    ----------
    mount
        An empty real folder: the disk's root.
    calls_left
        Number of changes after which the power fails or the process dies; None: never.
    broken
        Numbers of the syncs, from 0, that fail.
    ignored
        Kind of sync that reports success but makes nothing durable.
    """

    def __init__(
        self,
        mount: Path,
        *,
        calls_left: int | None = None,
        broken: range = range(0),
        ignored: Sync | None = None,
    ) -> None:
        self.mount = mount
        self.syncs = 0
        self._calls_left, self.broken, self._ignored = calls_left, broken, ignored
        self._root = _Folder()
        self._open: dict[int, _File | _Folder | None] = {}

    def restart(self) -> None:
        """Start another process: files of the previous process are still in the page cache."""
        self._calls_left = None

    # -- the calls --------------------------------------------------------------------------------------------------

    def _change(self) -> None:
        if self._calls_left is not None:
            if self._calls_left == 0:
                raise PowerLoss
            self._calls_left -= 1

    def _find(self, path: Path) -> _File | _Folder | None:
        """Return the model's node of a path; None if the path is not on this disk."""
        if not path.is_relative_to(self.mount):
            return None
        node: _File | _Folder = self._root
        for name in path.relative_to(self.mount).parts:
            assert isinstance(node, _Folder)
            node = node.names[name]
        return node

    def _folder(self, path: Path) -> _Folder:
        folder = self._find(path)
        assert isinstance(folder, _Folder), f"{path} is not on this disk"
        return folder

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._change()
        descriptor = os.open(path, flags, mode)
        if flags & os.O_CREAT:
            self._folder(path.parent).names[path.name] = _File()
        self._open[descriptor] = self._find(path)
        return descriptor

    def write(self, descriptor: int, data: memoryview, /) -> int:
        self._change()
        file = self._open[descriptor]
        assert isinstance(file, _File)
        # In pieces, as the system may.
        written = os.write(descriptor, data[: max(1, len(data) // 2)])
        file.content += data[:written]
        return written

    def fsync(self, fd: int) -> None:
        self._change()
        node = self._open[fd]
        if node is None:
            return  # above this disk, where nothing is made
        sync_number, self.syncs = self.syncs, self.syncs + 1
        if sync_number in self.broken:
            raise OSError(errno.EIO, "simulated: the disk failed")
        if isinstance(node, _File):
            if self._ignored != "content":
                node.durable = bytes(node.content)
            return
        kept = {
            name
            for name, child in node.names.items()
            if self._ignored != ("names of files" if isinstance(child, _File) else "names of folders")
        }
        stays = {name: child for name, child in node.durable.items() if name not in kept and name in node.names}
        node.durable = {name: child for name, child in node.names.items() if name in kept} | stays

    def close(self, fd: int) -> None:
        del self._open[fd]
        os.close(fd)

    def link(self, src: Path, dst: Path) -> None:
        self._change()
        os.link(src, dst)
        self._folder(dst.parent).names[dst.name] = self._folder(src.parent).names[src.name]

    def replace(self, src: Path, dst: Path) -> None:
        self._change()
        src.replace(dst)
        self._folder(dst.parent).names[dst.name] = self._folder(src.parent).names.pop(src.name)

    def unlink(self, path: Path) -> None:
        self._change()
        path.unlink()
        del self._folder(path.parent).names[path.name]

    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        self._change()
        path.mkdir(mode)
        self._folder(path.parent).names[path.name] = _Folder()

    def rmdir(self, path: Path) -> None:
        """Remove a folder as :func:`os.rmdir` does; durable at once."""
        path.rmdir()
        for names in (self._folder(path.parent).names, self._folder(path.parent).durable):
            names.pop(path.name, None)

    def stat(self, path: Path) -> os.stat_result:
        return path.stat()

    # -- after a power loss -----------------------------------------------------------------------------------------

    def after_power_loss(self, keeps: str, where: Path, chance: random.Random) -> Path:
        """Write the files that remain after the power loss to the new folder `where`, and return it."""
        self._restore(self._root, where, keeps, chance)
        return where

    def _restore(self, folder: _Folder, where: Path, keeps: str, chance: random.Random) -> None:
        where.mkdir()
        for name in folder.durable.keys() | folder.names.keys():
            durable, visible = folder.durable.get(name), folder.names.get(name)
            keep_visible = keeps == "all" or (keeps == "some" and chance.random() < 0.5)
            node = visible if durable is not visible and keep_visible else durable
            if isinstance(node, _Folder):
                self._restore(node, where / name, keeps, chance)
            elif node is not None:
                (where / name).write_bytes(node.durable)
