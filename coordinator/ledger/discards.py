"""Files of attempts that were never counted and are deleted: none of them counts from then on. Pure.

An attempt whose request hangs may ask to be counted at any time, long after cleaning took its files for those of a failed attempt. No
clock decides which of the two comes first: the log does. Cleaning writes into it which of the files that it is about to delete could
still be counted, and only then deletes them; from that record on every ledger refuses them (:meth:`Discards.refuse`).

A file is remembered for as long as nothing else refuses it: that of a commit until its shard is leased anew, or has gone beyond its
version; that of a snapshot until the version that it shows is retained no more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from coordinator.model.errors import CommitUnknownError

__all__ = ["DataFile", "Discards"]

_DATA_FILE = re.compile(
    r"^[^/]+/\d+/(?P<partition>\d+)/(?:[^/]+/)?(?P<version>\d+)-[0-9a-f]+(?:-\d+)?\.(?P<kind>delta|snapshot)$"
)


@dataclass(frozen=True, slots=True)
class DataFile:
    """What the path of a delta or of a part of a snapshot says."""

    partition_id: int
    version: int
    is_snapshot: bool

    @classmethod
    def of(cls, path: str) -> DataFile | None:
        """That of a path; None if it is no data file's."""
        match = _DATA_FILE.match(path)
        if match is None:
            return None
        return cls(int(match["partition"]), int(match["version"]), match["kind"] == "snapshot")


class Discards:
    """The files that are refused, each with the newest epoch at the time that it was discarded."""

    def __init__(self, epochs: Mapping[str, int] | None = None) -> None:
        self._epochs = dict(epochs or {})

    def add(self, files: Iterable[str], epoch: int) -> None:
        """Refuse files from here on."""
        for file in files:
            self._epochs[file] = epoch

    def keep(self, may_count: Callable[[str, int], bool]) -> None:
        """Forget the files that something else refuses: those for which `may_count`, given file and epoch, is false."""
        self._epochs = {file: epoch for file, epoch in self._epochs.items() if may_count(file, epoch)}

    def refuse(self, files: Iterable[str]) -> None:
        """Refuse to count an attempt one of whose files was discarded.

        Raises
        ------
        CommitUnknownError
            One was. Its writer deletes nothing: all that counts no more is cleaned away.
        """
        for file in files:
            if file in self._epochs:
                raise CommitUnknownError(
                    "the commit took too long: its file was cleaned away meanwhile, as no commit needed it, so it is not counted and "
                    "never will be; nothing is lost; repeat the task, which writes a new one; raise grace_s if this comes again",
                    file=file,
                )

    def copy(self) -> Discards:
        """The same; this one may go on."""
        return Discards(self._epochs)

    def to_json(self) -> dict[str, int]:
        """As data, for a checkpoint of the log."""
        return dict(self._epochs)
