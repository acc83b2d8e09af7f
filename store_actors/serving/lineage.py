"""The history of a partition that memory has, and whether a batch may go on from it. Pure rules, for operators and keyed stores alike.

Theory of operation
-------------------
Memory is a cache of what the coordinator counts. A partition that is loaded is at one version, whose lineage is known by the attempts
that made it and the few versions before. A batch brings a lease (its epoch) and the version that it reads, its base:

- Same epoch and run, memory at the base: no other process can have committed since, so memory is right, and none is asked
  (:meth:`Lineage.is_hot`).
- Otherwise the coordinator is asked, once, which attempt made the base. If that is the one that memory knows, memory is kept, or
  rolled back to it; else it is loaded (:meth:`Lineage.sync_action`).
- Memory that is at an earlier version of what counts, as of a partition that was copied from another store actor, catches up by the
  commits since, unless they are in another schema.
- A commit that is counted is the next version, be it that of this attempt or of another one of the run (:meth:`Lineage.committed`).
- After a commit that fails it is not known what counts: memory is forgotten (:meth:`Lineage.forget`).

::

    FORGOTTEN --loaded--> LOADED --committed--> LOADED (next version)
                          LOADED --rolled_back--> LOADED (an earlier one)
                          LOADED --caught_up--> LOADED (a later one)
        ^------------- forget -------|
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from coordinator.model.commits import CommitEntry

#: Versions behind the newest whose attempt is remembered; more than memory can go back.
_KNOWN_ATTEMPTS = 4


class SyncAction(StrEnum):
    """The action that brings memory to a version."""

    #: Nothing: memory is at that version.
    KEEP = "keep"
    #: Undo: memory is at a later one of the same history.
    ROLLBACK = "rollback"
    #: The commits since: memory is at an earlier one of the same history.
    CATCH_UP = "catch up"
    #: Files: memory is of another history, or of none.
    RELOAD = "reload"


@dataclass(slots=True)
class Lineage:
    """The history that memory holds of one partition.

    Attributes
    ----------
    is_loaded
        Whether memory holds anything; all else but `epoch`, `run_id` and `deltas` counts only then.
    epoch, run_id
        Of the lease under which it was last brought to a version; -1 and empty before.
    attempts
        Counted attempt of each version that memory may still reach; the empty version has none.
    newest
        The counted commits, one a store, that made the version; none if it was loaded.
    deltas
        Commits since the last snapshot: what loading would replay.
    restore_ms, load_bytes
        How long it took to bring memory to the version that the next commit builds on, and bytes of the files that were read for it.
    failures
        Commits that failed since the last one that counted, by error.
    """

    is_loaded: bool = False
    version: int = 0
    epoch: int = -1
    run_id: str = ""
    attempts: dict[int, str] = field(default_factory=dict)
    newest: tuple[CommitEntry, ...] = ()
    deltas: int = 0
    restore_ms: int = 0
    load_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def is_hot(self, epoch: int, run_id: str, base: int) -> bool:
        """Return whether memory is at a lease's base version beyond doubt.

        An epoch is of one run; of a state that was put back from a backup, epochs are given again, to other runs.
        """
        return self.is_loaded and (self.epoch, self.run_id, self.version) == (epoch, run_id, base)

    def knows(self, version: int, counted: str) -> bool:
        """Return whether the attempt that counts for a version is the one that made it here."""
        return self.is_loaded and self.attempt_of(version) == counted

    def attempt_of(self, version: int) -> str:
        """Return the attempt that made a version here; empty for one that is not remembered, and for the empty one."""
        return self.attempts.get(version, "")

    def sync_action(self, base: int, counted: str, earlier: Mapping[int, str] = MappingProxyType({})) -> SyncAction:
        """Return what brings memory to a lease's base version.

        Parameters
        ----------
        counted
            The attempt that made it, as the coordinator counts; empty for the empty version.
        earlier
            Attempts that made the versions before, from which the base version can be made by their commits.
        """
        if self.version < base and self.version in earlier and self.knows(self.version, earlier[self.version]):
            return SyncAction.CATCH_UP
        if not self.knows(base, counted) or base > self.version:
            return SyncAction.RELOAD
        return SyncAction.KEEP if base == self.version else SyncAction.ROLLBACK

    def recorded(self, run_id: str, version: int) -> bool:
        """Return whether the version in memory is the one asked for, made by this very run: its task is a repeated one."""
        return self.is_loaded and any((entry.run_id, entry.version) == (run_id, version) for entry in self.newest)

    def rolled_back(self, base: int) -> None:
        """Memory is at an earlier version: its rows must not become the snapshot of a newer commit."""
        self.version = base
        self.newest = tuple(entry for entry in self.newest if entry.version == base)

    def caught_up(self, base: int, counted: str, deltas: int) -> None:
        """Note that `deltas` deltas brought memory to a later version."""
        self.loaded(base, counted, self.deltas + deltas)

    def loaded(self, base: int, counted: str, deltas: int) -> None:
        """Note that memory was loaded at version `base` by replaying `deltas` deltas."""
        self.is_loaded, self.version, self.newest, self.deltas = True, base, (), deltas
        self.attempts = {base: counted} if counted else {}

    def leased(self, epoch: int, run_id: str, restore_ms: int = 0, load_bytes: int = 0) -> None:
        """Note that memory was brought to the base version of a lease."""
        self.epoch, self.run_id = epoch, run_id
        self.restore_ms, self.load_bytes = restore_ms, load_bytes

    def unleased(self) -> None:
        """Note that memory is a copy of another store actor's, so that no earlier lease here applies to it."""
        self.epoch, self.run_id = -1, ""

    def committed(self, counted: Sequence[CommitEntry]) -> None:
        """Note that memory is what these commits, one a store, made."""
        self.version, self.newest = counted[0].version, tuple(counted)
        self.attempts[self.version] = counted[0].attempt_id
        for version in [older for older in self.attempts if older < self.version - _KNOWN_ATTEMPTS]:
            del self.attempts[version]
        self.deltas += 1
        self.restore_ms = self.load_bytes = 0
        self.failures.clear()

    def snapshot_written(self, deltas: int) -> None:
        """Note a snapshot that covers `deltas` deltas."""
        self.deltas = max(0, self.deltas - deltas)

    def forget(self) -> None:
        """Note that memory holds nothing any more."""
        self.is_loaded, self.epoch, self.newest = False, -1, ()
        self.attempts.clear()
