"""Rows of a shard's version as storage has them, read by the product's own restorer."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pyarrow as pa

from coordinator.model.identities import DEFAULT_STORE, StateStoreId
from coordinator.model.schema import StateSchema
from store_actors.operators.make_shard import OperatorShard
from store_actors.serving.operator_shards import OperatorShards

#: The folder of a fleet with two states, ``clicks`` and ``profiles``, in the format of this release.
STORED = Path(__file__).parent / "data" / "state"


def stored_rows(shards: OperatorShards, store_id: StateStoreId, version: int, schema: StateSchema) -> pa.Table:
    """Return all rows of any retained version, in ``row_schema``; shards in memory are not touched.

    Raises
    ------
    InvalidRequestError
        The version is not retained.
    CorruptStateError
        A file that it needs is missing or damaged.
    """
    partitions = shards.partitions
    loading = partitions.coordinator.load_plans(store_id.state_name, store_id.partition_id, version, (DEFAULT_STORE,))
    row_format = partitions.restorer.format_of(store_id, schema)
    store, _ = partitions.restorer.load(store_id, version, row_format, loading.plans[DEFAULT_STORE])
    return cast(OperatorShard, store).snapshot()
