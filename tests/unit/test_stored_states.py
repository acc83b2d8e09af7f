"""States of the format of this release (tests/data/state): later code reads them as this one did, and writes the same fields."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from coordinator.ledger.records import Record, recorded
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.log_end import unseal
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.identities import ShardKey, StateStoreId
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.stored_json import from_json
from coordinator.runtime.runtime import Runtime
from coordinator.storage.local import LocalObjectStore
from statefleet.reads.fleet import attach
from statefleet.reads.stored import StoredSource
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.stored_shards import STORED, stored_rows

EXPECTED: dict[str, Any] = json.loads((STORED / "expected.json").read_text())
CLICKS, PROFILES = "clicks", "profiles"
STATES = (CLICKS, PROFILES)


def objects() -> LocalObjectStore:
    return LocalObjectStore(STORED)


def ledger_of(state: str) -> StateLedger:
    return ManifestLog(objects(), state, "reader").load()


def metadata_of(state: str) -> StateMetadata:
    metadata = ManifestLog(objects(), state, "reader").load_metadata()
    assert metadata is not None
    return metadata


def sealed(state: str, folder: str) -> list[Path]:
    return sorted((STORED / state / folder).glob("*.json"))


def bodies(state: str, folder: str) -> list[dict[str, Any]]:
    return [unseal(file.read_bytes()) for file in sealed(state, folder)]


def shards(state: str) -> dict[str, ShardKey]:
    split = {name: name.split("/") for name in EXPECTED[state]["facts"]["newest"]}
    return {name: (int(partition), store) for name, (partition, store) in split.items()}


def plain(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Return rows as JSON has them, sorted by their text."""
    lists = [[value.isoformat() if hasattr(value, "isoformat") else value for value in row.values()] for row in rows]
    return sorted(lists, key=str)


#: Kinds of records that the log of an aggregation has: others are of rescales, branches, drops and failed moves.
KINDS = {
    "run_started", "schema_changed", "shards_assigned", "committed", "snapshot", "truncated", "batch_finished"
}  # fmt: skip


# -- reading ----------------------------------------------------------------------------------------------------------


def test_the_test_data_has_the_kinds_of_records_of_a_query_and_two_checkpoints() -> None:
    records = [record for body in bodies(CLICKS, "manifest") for record in body["records"]]
    assert {record["kind"] for record in records} == KINDS
    assert [body["seq"] for body in bodies(CLICKS, "checkpoints")] == [64, 128]
    assert [body["seq"] for body in bodies(CLICKS, "manifest")] == list(range(65, 145))
    assert {record_body["entry"]["store_name"] for record_body in records_of(PROFILES, "committed")} == {
        "default",
        "seen",
    }


def records_of(state: str, kind: str) -> list[dict[str, Any]]:
    return [record for body in bodies(state, "manifest") for record in body["records"] if record["kind"] == kind]


@pytest.mark.parametrize("state", STATES)
def test_the_ledger_says_the_same(state: str) -> None:
    ledger, facts = ledger_of(state), EXPECTED[state]["facts"]
    assert (ledger.epoch, ledger.run_id, ledger.query_id) == (facts["epoch"], facts["run_id"], facts["query_id"])
    assert sorted(ledger.retired) == facts["retired"]
    schemas: Sequence[tuple[int, StateSchema]] = ()
    for name, (partition, store) in shards(state).items():
        newest = ledger.newest(partition, store)
        assert newest is not None
        assert newest.version == facts["newest"][name]
        plan = ledger.load_plans(partition, newest.version, (store,)).plans[store]
        assert plan.oldest_retained == facts["floors"][name]
        schemas = plan.schemas
        assignment = ledger.assignment(partition)
        assert assignment is not None
        assert [assignment.epoch, assignment.location.actor_name] == facts["locations"][str(partition)]
    assert ledger.total_rows_late() == sum(facts["rows_late"].values())
    accumulators = [
        [f"{accumulator.meaning}:{accumulator.state[0].type}" for accumulator in schema.accumulators]
        for _, schema in schemas
    ]
    assert [[epoch, names] for (epoch, _), names in zip(schemas, accumulators, strict=True)] == facts["schemas"]


def test_the_records_after_a_checkpoint_lead_to_the_next_one() -> None:
    older, newer = bodies(CLICKS, "checkpoints")
    ledger = StateLedger.from_json(f"{objects().uri}/{CLICKS}", older["folded"])
    for body in bodies(CLICKS, "manifest"):
        if body["seq"] <= newer["seq"]:
            for record in body["records"]:
                ledger.fold(from_json(record, Record))
    assert json.loads(json.dumps(ledger.to_json())) == newer["folded"]


def test_a_log_without_its_newest_checkpoint_says_the_same() -> None:
    class WithoutNewest(LocalObjectStore):
        def list(self, prefix: str) -> list[Any]:
            return [
                info for info in super().list(prefix) if not info.path.endswith("checkpoints/" + f"{128:020d}.json")
            ]

    assert ManifestLog(WithoutNewest(STORED), CLICKS, "reader").load().to_json() == ledger_of(CLICKS).to_json()


def test_an_aggregation_has_the_same_rows() -> None:
    ledger = ledger_of(CLICKS)
    newest = ledger.described(metadata_of(CLICKS))
    schema = newest.schema
    assert schema is not None
    store = OperatorShards(Partitions(objects(), StoredSource(objects(), Runtime())))  # type: ignore[arg-type]
    for name, (partition, _) in shards(CLICKS).items():
        version = EXPECTED[CLICKS]["facts"]["newest"][name]
        rows = stored_rows(store, StateStoreId(ledger.root, 0, partition), version, schema).to_pylist()
        assert plain(rows) == EXPECTED[CLICKS]["rows"][name]
    # The version is loaded from a snapshot and deltas in two schemas.
    assert store.metrics.snapshots_loaded == len(shards(CLICKS))
    assert store.metrics.deltas_loaded > 0


@pytest.mark.parametrize("store", ["default", "seen"])
def test_keyed_stores_have_the_same_rows(store: str) -> None:
    state = attach(f"file://{STORED}", offline=True).state(PROFILES, store)
    rows = state.at(EXPECTED[PROFILES]["facts"]["newest"]["0/default"]).scan().to_arrow().to_pylist()
    assert plain(rows) == EXPECTED[PROFILES]["rows"][f"0/{store}"]


def test_every_file_that_is_needed_is_there_and_no_other() -> None:
    for state in STATES:
        stored = {info.path for info in objects().list(f"{state}/0")}
        assert ledger_of(state).referenced_files() == stored


# -- writing ----------------------------------------------------------------------------------------------------------


def text_of(body: dict[str, Any], written: dict[str, Any]) -> bytes:
    """Return the file of a body's fields with these written anew: its checksum is the last field, and of the sorted fields."""
    checksum = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    return json.dumps({**body, **written, "checksum": checksum}).encode()


@pytest.mark.parametrize("state", STATES)
def test_records_are_written_in_the_same_bytes(state: str) -> None:
    for file in sealed(state, "manifest"):
        data = file.read_bytes()
        body = unseal(data)
        records = [to_builtins(recorded(record)) for record in from_json(body["records"], list[Record])]
        assert text_of(body, {"records": records}) == data, file.name


def test_checkpoints_are_written_in_the_same_bytes() -> None:
    for file in sealed(CLICKS, "checkpoints"):
        data = file.read_bytes()
        body = unseal(data)
        ledger = StateLedger.from_json("file:///elsewhere/clicks", body["folded"])
        assert text_of(body, {"folded": ledger.to_json()}) == data, file.name


@pytest.mark.parametrize("state", STATES)
def test_metadata_is_written_in_the_same_bytes(state: str) -> None:
    data = (STORED / state / "metadata.json").read_bytes()
    assert text_of(unseal(data), metadata_of(state).to_json()) == data
