"""The folder that state is spilled to: there, on a disk, and with room."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from coordinator.model.errors import MemoryLimitError

#: File systems that lie in memory: what is spilled there takes the memory that it was to free.
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def checked_folder(folder: str) -> str:
    """Return a folder that can be spilled to; it is made if it is not there.

    Raises
    ------
    MemoryLimitError
        It cannot be written, or lies in memory.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MemoryLimitError(
            "the spill folder of a store actor cannot be written; nothing was changed; name another one with spill_dir",
            spill_dir=folder,
            cause=error,
        ) from error
    kind = file_system(folder)
    if kind in IN_MEMORY:
        raise MemoryLimitError(
            f"the spill folder of a store actor lies in memory ({kind}): what is spilled there takes the memory that it was to free; "
            "nothing was changed; name a folder on a local disk with spill_dir",
            spill_dir=folder,
        )
    return folder


def free_bytes(folder: str) -> int:
    """Return the bytes that can still be written in a folder."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def file_system(folder: str) -> str:
    """Return the type of a folder's file system; empty if the system does not name it."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, about = line.partition(" - ")
        if mount.split()[2] == number:
            return about.split()[0]
    return ""
