"""What may be deleted: the pure rules of cleaning a state's folder.

A file is deleted if no retained version needs it, no reader has asked for it lately, and it is older than the grace period, for until
then it may belong to a commit on its way. The other half of that rule is :func:`check_age`: a commit that took longer is refused, so
no file can be deleted first and counted afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from coordinator.errors import FencedError
from coordinator.storage import ObjectInfo

__all__ = ["Pins", "check_age", "orphans", "prunable_records"]

_DATA_FILE = re.compile(r"^[^/]+/\d+/\d+/(?:[^/]+/)?\d+-[0-9a-f]+\.(?:delta|snapshot)$")
_RECORD = re.compile(r"/(?P<folder>manifest|checkpoints)/(?P<seq>\d{20})\.json$")


def check_age(file: str, written_at_ms: int, now_ms: int, grace_s: float) -> None:
    """Refuse to count a file that cleaning may have taken for an orphan.

    Raises
    ------
    FencedError
        It was begun more than half the grace period ago (the other half is for clocks that differ).
    """
    if now_ms - written_at_ms > grace_s * 500:
        raise FencedError(
            "the commit took too long: its file may have been cleaned away meanwhile; nothing was counted, and the task may repeat it",
            file=file,
            age_s=(now_ms - written_at_ms) // 1000,
            grace_s=grace_s,
        )


def orphans(
    infos: Iterable[ObjectInfo], referenced: Collection[str], pinned: Collection[str], now_s: float, grace_s: float
) -> list[ObjectInfo]:
    """Data files of a state that may be deleted: of failed attempts, superseded commits and truncated versions."""
    return [
        info
        for info in infos
        if _DATA_FILE.match(info.path)
        and info.path not in referenced
        and info.path not in pinned
        and now_s - info.modified_s > grace_s
    ]


def prunable_records(infos: Iterable[ObjectInfo], now_s: float, grace_s: float) -> list[ObjectInfo]:
    """Records of the manifest log that loading does not need any more: those up to the second newest checkpoint.

    The newest checkpoint may turn out unreadable, so the one before it and all records after that stay. A coordinator that has not
    looked at the log for half the grace period reads it anew before it appends (``LedgerKeeper``), so a freed place is never taken.
    """
    found = [(match["folder"], int(match["seq"]), info) for info in infos if (match := _RECORD.search(info.path))]
    checkpoints = sorted(seq for folder, seq, _ in found if folder == "checkpoints")
    if len(checkpoints) < 2:
        return []
    needed = checkpoints[-2]
    return [
        info
        for folder, seq, info in found
        if now_s - info.modified_s > grace_s and (seq < needed if folder == "checkpoints" else seq <= needed)
    ]


@dataclass(slots=True)
class Pins:
    """Files that somebody was told to read, until some time after."""

    ttl_s: float
    _until: dict[str, float] = field(default_factory=dict)

    def add(self, files: Iterable[str], now_s: float) -> None:
        for file in files:
            self._until[file] = now_s + self.ttl_s

    def current(self, now_s: float) -> set[str]:
        """Pinned files; forgets those whose time is over."""
        self._until = {file: until for file, until in self._until.items() if until > now_s}
        return set(self._until)
