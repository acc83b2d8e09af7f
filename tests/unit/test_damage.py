"""Damaged bytes of any file are reported as damage: never a crash, never silently wrong rows."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.log.manifest_log import ManifestLog
from coordinator.model.errors import CorruptStateError
from coordinator.model.identities import StateStoreId
from tests.stored_shards import stored_rows
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, counts, filled

#: States whose files examples damage in copies of their own.
THREE, WITH_SNAPSHOT, WITH_RECORDS = filled(3), filled(4, (3,)), filled(3, (2,))
SHARD = StateStoreId("memory:///s", 0, 0)
DAMAGE = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 1 << 30), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.integers(0, 1 << 30), st.just(0)),
    st.tuples(st.just("insert"), st.integers(0, 1 << 30), st.integers(0, 255)),
    st.tuples(st.just("zero"), st.integers(0, 1 << 30), st.integers(1, 64)),
)


def damaged(data: bytes, damage: tuple[str, int, int]) -> bytes:
    kind, position, value = damage
    index = position % len(data)
    match kind:
        case "flip":
            return data[:index] + bytes([data[index] ^ value]) + data[index + 1 :]
        case "cut":
            return data[:index]
        case "insert":
            return data[:index] + bytes([value]) + data[index:]
        case _:
            return data[:index] + bytes(len(data[index : index + value])) + data[index + value :]


def of(fleet: AggregationFleet, suffix: str) -> list[str]:
    return [info.path for info in fleet.objects.list("s") if info.path.endswith(suffix)]


@settings(max_examples=300, deadline=None)
@given(damage=DAMAGE, which=st.integers(0, 99))
def test_a_damaged_delta_is_never_read(damage: tuple[str, int, int], which: int) -> None:
    fleet = THREE.copied()
    paths = of(fleet, ".delta")
    path = paths[which % len(paths)]
    content = fleet.objects.get(path)
    fleet.objects.put(path, damaged(content, damage))
    if damaged(content, damage) == content:
        assert counts(stored_rows(fleet.store, SHARD, 3, SCHEMA)) == {"a": 3, "b": 1}
        return
    with pytest.raises(CorruptStateError, match=path):
        stored_rows(fleet.store, SHARD, 3, SCHEMA)


@settings(max_examples=200, deadline=None)
@given(damage=DAMAGE)
def test_a_damaged_snapshot_changes_no_answer(damage: tuple[str, int, int]) -> None:
    fleet = WITH_SNAPSHOT.copied()
    (path,) = of(fleet, ".snapshot")
    fleet.objects.put(path, damaged(fleet.objects.get(path), damage))
    assert counts(stored_rows(fleet.store, SHARD, 4, SCHEMA)) == {"a": 4, "b": 1}


@settings(max_examples=300, deadline=None)
@given(damage=DAMAGE, which=st.integers(0, 99))
def test_a_damaged_record_is_named(damage: tuple[str, int, int], which: int) -> None:
    fleet = WITH_RECORDS.copied()
    paths = [info.path for info in fleet.objects.list("s/manifest")]
    whole = ManifestLog(fleet.objects, "s", "reader").load().to_json()
    path = paths[which % len(paths)]
    fleet.objects.put(path, damaged(fleet.objects.get(path), damage))
    try:
        message, ledger = "", ManifestLog(fleet.objects, "s", "reader").load()
    except CorruptStateError as error:
        message = str(error)
    # A space that became a line break does not change the record.
    assert path in message or ledger.to_json() == whole


def test_damaged_metadata_is_named() -> None:
    from coordinator.log.ledger_writer import LedgerWriter
    from coordinator.model.state_metadata import StateMetadata

    fleet = AggregationFleet()
    log = ManifestLog(fleet.objects, "s", "writer")
    log.create_metadata(StateMetadata("s", "q", 4, "update"))
    content = fleet.objects.get("s/metadata.json")
    fleet.objects.put("s/metadata.json", content.replace(b"4", b"5"))
    with pytest.raises(CorruptStateError, match=r"metadata\.json"):
        asyncio.run(LedgerWriter(log).open())
