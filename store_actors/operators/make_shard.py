"""The protocol of a stateful operator's shard, and the class of each operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from coordinator.model.schema import OperatorKind, StateSchema
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.table_view import ShardView, TableView
from store_actors.engine.versions import Change, VersionedStore, VersionedTable
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.operators.as_of_join import AsOfShard
from store_actors.operators.deduplicate import DeduplicateShard, LimitShard
from store_actors.operators.join import JoinShard
from store_actors.operators.join_schema import JoinOptions
from store_actors.operators.session_windows import SessionShard
from store_actors.operators.top import top_shard


class OperatorShard(VersionedStore, Protocol):
    """A shard of a stateful operator. Life of a batch: :meth:`apply`, then :meth:`commit` or :meth:`abort`."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's words, at most; strings and lists are beside it."""

    def output_watermark_ms(self, watermark_ms: int) -> int:
        """Return the watermark of what is emitted once the operator's watermark is `watermark_ms`."""

    def apply(self, rows: ShardInput, watermark_ms: int, version: int, late_ms: int | None = None) -> Change:
        """Fold a batch into the newest version, as `version`, not yet committed."""

    def output(self, delta: pa.Table) -> pa.Table:
        """Return the rows that a batch emits, where its change does not carry them."""

    def snapshot(self) -> pa.Table:
        """Return all rows of the newest version."""


def _join_shard(schema: StateSchema, seed: int, memory: Memory) -> JoinShard:
    shard = JoinShard if JoinOptions.of(schema.options).as_of is None else AsOfShard
    return shard(schema, seed, memory)


_SHARDS: dict[OperatorKind, Callable[[StateSchema, int, Memory], OperatorShard]] = {
    OperatorKind.AGGREGATE: AggregateShard,
    OperatorKind.SESSION: SessionShard,
    OperatorKind.DEDUPLICATE: DeduplicateShard,
    OperatorKind.JOIN: _join_shard,
    OperatorKind.TOP: top_shard,
    OperatorKind.LIMIT: LimitShard,
}


def make_shard(schema: StateSchema, seed: int, memory: Memory = HEAP) -> OperatorShard:
    """Return an empty shard of an operator; `seed` and `memory` as of :class:`~store_actors.engine.word_rows.WordRows`."""
    return _SHARDS[schema.operator](schema, seed, memory)


def view_of(shard: VersionedStore, version: int) -> ShardView:
    """Return a retained version of an operator's shard, to be read."""
    if isinstance(shard, JoinShard):
        return shard.view(version)
    assert isinstance(shard, VersionedTable)
    return TableView(shard, version)
