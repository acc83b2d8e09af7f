"""A shard that is copied from one store to another, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from coordinator.model.identities import StateStoreId, TaskIdentity
from store_actors.messages.requests import Transfer
from store_actors.serving.keyed_stores import KeyedStores
from store_actors.serving.operator_shards import OperatorShards
from tests.unit.aggregation_fleet import LocalCoordinator

Kind = OperatorShards | KeyedStores


def store_id(coordinator: LocalCoordinator, batch: int) -> StateStoreId:
    return coordinator.lease(TaskIdentity("s", "query", "run-1", batch, 0, 0, "executor"), "a").lease.store_id


def offer_of(source: Kind, shard: StateStoreId) -> Transfer:
    offer = source.partitions.transfers.begin(shard)
    assert offer is not None
    return offer


def pieces(source: Kind, offer: Transfer) -> Iterator[tuple[int, pa.Table]]:
    while (piece := source.partitions.transfers.next_piece(offer.transfer_id)) is not None:
        yield piece


def transfer_shard(source: Kind, target: Kind, shard: StateStoreId) -> int:
    """Copy a shard from `source` to `target`, and return the version that `target` then has."""
    offer = offer_of(source, shard)
    return target.partitions.transfers.take(shard, offer, pieces(source, offer))[0]
