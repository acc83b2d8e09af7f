"""States that are read from their files, without a store actor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa
from hypothesis import strategies as st

from coordinator.log.manifest_log import ManifestLog
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from statefleet.reads.state import LiveState
from store_actors.engine.spark_hash import shards_of
from tests.memory_store import MemoryObjectStore
from tests.unit.aggregation_fleet import AggregationFleet
from tests.unit.damages import state_in
from tests.unit.keyed_fleet import KeyedFleet
from tests.unit.top_machine import input_of

SHARDS = 3
Rows = list[tuple[str, float | None]]


def open_state(objects: MemoryObjectStore, shards: int, schema: StateSchema | None) -> LiveState:
    """Return the state as an offline reader sees it."""
    metadata = StateMetadata("s", "query", shards, "update", schema)
    log = ManifestLog(objects, "s", "test")
    log.create_metadata(metadata)
    ledger = log.load()
    log.append(ledger.decide_finished(ledger.run_id, ledger.newest_version(0) - 1))
    return state_in(objects, "s", consistency="finished")


def of_operator(schema: StateSchema, batches: Sequence[Rows]) -> LiveState:
    """Return a state of an operator after batches of rows, each row on the shard of its key."""
    fleet = AggregationFleet()
    names = schema.raw_schema().names
    for batch, rows in enumerate(batches):
        keys = pa.record_batch({"v": pa.array([key for key, _ in rows], pa.string())})
        shard_of_row = shards_of(keys, ("v",), SHARDS)
        for shard in range(SHARDS):
            shard_rows = [
                dict(zip(("v", "x"), row, strict=True))
                for row, row_shard in zip(rows, shard_of_row, strict=True)
                if row_shard == shard
            ]
            shard_input = input_of(schema, [{name: row[name] for name in names} for row in shard_rows])
            fleet.store.apply(fleet.request(batch, schema=schema, shard=shard), shard_input)
    return open_state(fleet.objects, SHARDS, schema)


def of_store(batches: Sequence[Rows]) -> LiveState:
    """Return the state of a keyed store after batches of rows; a row without a value removes its key."""
    fleet = KeyedFleet()
    for batch, rows in enumerate(batches):
        session = fleet.open(batch)
        for key, value in rows:
            if value is None:
                fleet.call(session, "remove", pa.record_batch({"k": [key]}))
            else:
                fleet.put(session, **{key: 0 if math.isnan(value) else int(value)})
        fleet.stores.commit(session)
    return open_state(fleet.objects, 1, None)


rows = st.lists(
    st.tuples(st.sampled_from("abcdefg"), st.none() | st.sampled_from([0.0, 1.0, 2.0, math.nan])), max_size=6
)


batches = st.lists(rows, min_size=1, max_size=5)
