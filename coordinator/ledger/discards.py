"""Files of attempts that were not committed and are deleted: commits of them are refused from then on. Pure.

An attempt whose request hangs may ask for its commit at any time, long after cleaning took its files for those of a failed attempt. No
clock decides which of the two comes first: the log does. Cleaning writes into it which of the files that it is about to delete could
still be committed, and only then deletes them. From that record on every ledger refuses them (:meth:`Discards.refuse`).

A file is remembered for as long as no other rule refuses it: a delta until its shard is leased again, or has passed its version; a
snapshot until its version is not retained any more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from coordinator.model.errors import CommitUnknownError

_DATA_FILE = re.compile(
    r"^[^/]+/\d+/(?P<partition>\d+)/(?:[^/]+/)?(?P<version>\d+)-[0-9a-f]+(?:-\d+)?\.(?P<kind>delta|snapshot)$"
)


@dataclass(frozen=True, slots=True)
class DataFile:
    """The fields in the path of a delta, or of a part of a snapshot."""

    partition_id: int
    version: int
    is_snapshot: bool

    @classmethod
    def of(cls, path: str) -> DataFile | None:
        """Return the fields of a path; None if it is not a data file's."""
        match = _DATA_FILE.match(path)
        if match is None:
            return None
        return cls(int(match["partition"]), int(match["version"]), match["kind"] == "snapshot")


class Discards:
    """The refused files, each with the newest epoch at the time that it was discarded."""

    def __init__(self, epochs: Mapping[str, int] | None = None) -> None:
        self._epochs = dict(epochs or {})

    def add(self, files: Iterable[str], epoch: int) -> None:
        """Refuse files from here on."""
        for file in files:
            self._epochs[file] = epoch

    def keep(self, may_count: Callable[[str, int], bool]) -> None:
        """Forget the files that another rule refuses: those for which `may_count`, given file and epoch, is false."""
        self._epochs = {file: epoch for file, epoch in self._epochs.items() if may_count(file, epoch)}

    def refuse(self, files: Iterable[str]) -> None:
        """Refuse to accept an attempt one of whose files was discarded.

        Raises
        ------
        CommitUnknownError
            A file was discarded. Its writer deletes nothing: cleaning deletes all files that are not needed.
        """
        for file in files:
            if file in self._epochs:
                raise CommitUnknownError(
                    "the commit took too long: its file was cleaned away meanwhile, as no commit needed it, so it is not counted and "
                    "never will be; nothing is lost; repeat the task, which writes a new one; raise grace_s if this comes again",
                    file=file,
                )

    def copy(self) -> Discards:
        """Return a copy that does not change with this one."""
        return Discards(self._epochs)

    def to_json(self) -> dict[str, int]:
        """Return the files as JSON data, for a checkpoint of the log."""
        return dict(self._epochs)
