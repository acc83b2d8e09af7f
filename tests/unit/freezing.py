"""What state machines share whose shards are read, piece by piece, while they go on."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from store_actors.engine.versions import Frozen

__all__ = ["FreezingMachine", "read_frozen", "tables_of"]


def tables_of(shard: Any) -> list[Any]:
    """Tables of any kind of shard."""
    if hasattr(shard, "_sides"):
        return [side.table for side in shard._sides]
    return [shard._table.table if hasattr(shard, "_table") else shard.table]


def read_frozen(frozen: Frozen, schema: pa.Schema) -> pa.Table:
    """All rows that are left of a frozen shard."""
    return pa.concat_tables([schema.empty_table(), *(table for made in frozen for table in made())])


class FreezingMachine(RuleBasedStateMachine):
    """Its shard is frozen at any moment, and what was frozen is read a few rows at a time, whatever happens meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._frozen: Frozen | None = None
        self._then: list[str] = []
        self._read: list[str] = []

    def frozen_shard(self) -> Any:
        """The shard."""
        return self.shard  # type: ignore[attr-defined]

    @precondition(lambda self: self._frozen is None)
    @rule(words=st.sampled_from([1, 16, 64, 1 << 20]))
    def freeze(self, words: int) -> None:
        shard = self.frozen_shard()
        for table in tables_of(shard):
            table.snapshot_bytes = 8 * words
        self._then, self._read = sorted(map(repr, shard.snapshot().to_pylist())), []
        self._frozen = shard.frozen()

    @precondition(lambda self: self._frozen is not None)
    @rule(pieces=st.integers(1, 3))
    def read_some(self, pieces: int) -> None:
        assert self._frozen is not None
        for _ in range(pieces):
            made = next(self._frozen, None)
            if made is None:
                self._frozen = None
                assert sorted(self._read) == self._then
                return
            self._read += [repr(row) for table in made() for row in table.to_pylist()]

    @precondition(lambda self: self._frozen is not None)
    @rule()
    def stop_reading(self) -> None:
        assert self._frozen is not None
        self._frozen.close()
        self._frozen = None

    def teardown(self) -> None:
        while self._frozen is not None:
            self.read_some(1)
