"""Versions that are made in memory before they are committed, so that the next one is made meanwhile. No Ray."""

from __future__ import annotations

from coordinator.model.errors import FencedError
from coordinator.model.identities import DEFAULT_STORE
from store_actors.engine.versions import Change
from store_actors.serving.commits import Transaction
from store_actors.serving.partition import Writer

#: Commits of sealed versions that are under way at once, each of another shard.
COMMITS_AT_ONCE = 64


class SealedVersion(Transaction):
    """The version of an epoch. Memory is at it from the moment it is prepared."""

    #: What makes the next version: memory is of this one's history while it is the partition's writer.
    writer: Writer

    @property
    def is_in_memory(self) -> bool:
        return self.partition.writer is self.writer

    @property
    def change(self) -> Change:
        """The change of the default store, once it is prepared."""
        return self._prepared[DEFAULT_STORE].change

    def prepare(self) -> None:
        super().prepare()
        super().commit()

    def commit(self) -> None:
        """Nothing: memory is at the version."""

    def abort(self) -> None:
        """Refuse: no other attempt of a run makes its versions.

        Raises
        ------
        FencedError
            Always.
        """
        raise FencedError(
            "another process has committed an epoch of this run; nothing of it was committed here; start the query again",
            state=self.task.state_name,
            partition=self.task.partition_id,
            run_id=self.task.run_id,
        )
