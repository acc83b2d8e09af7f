"""Statistics of versions, and the versions that a damaged file costs, across a rescale: on a real log in memory."""

from __future__ import annotations

import json
import zlib

import pyarrow as pa
import pytest
from msgspec import structs

from coordinator.ledger.read_views import version_stats
from coordinator.ledger.records import Record
from coordinator.ledger.rescaling import decide_shards
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.schema import Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.stored_json import FORMAT
from coordinator.placement.lease_plans import stay_else_local
from statefleet.reads.verify import check_files, files_of
from tests.memory_store import MemoryObjectStore
from tests.unit.ledger_harness import FakeFleetView, actor, entry, task

SCHEMA = StateSchema((Field("k0", "int32"),), (), (), None, None, "update")
CREATED = StateMetadata("clicks", "query", 2, "update", SCHEMA)


#: What a data file has to say of itself to be read.
FACTS = json.dumps({"format": FORMAT})


class RescaledState:
    """A state of two shards for two versions, and of four from then on."""

    def __init__(self) -> None:
        self.objects = MemoryObjectStore()
        self.log = ManifestLog(self.objects, "clicks", "writer")
        self.log.create_metadata(CREATED)
        self.ledger = self.log.load()
        for batch, shards in enumerate((2, 2, 4, 4)):
            self.batch(f"run-{shards}", batch, shards)

    def fold(self, records: list[Record]) -> None:
        if records:
            self.log.append(records)
        for record in records:
            self.ledger.fold(record)

    def batch(self, run: str, batch: int, shards: int) -> None:
        records, layout = decide_shards(self.ledger, CREATED, task(run, batch), shards)
        self.fold(records)
        assert layout.num_shards == shards
        for shard, partition in enumerate(layout.partitions):
            records, grant = self.ledger.decide_lease(
                task(run, batch, partition), actor("a"), FakeFleetView(), stay_else_local
            )
            self.fold(records)
            sink = pa.BufferOutputStream()
            table = pa.table({"k0": [partition], "__change": pa.array([0], pa.int8())}, metadata={"statefleet": FACTS})
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            data = sink.getvalue().to_pybytes()
            commit = structs.replace(
                entry(grant, batch + 1),
                attempt_id=f"{batch}{partition}",
                file=f"clicks/0/{partition}/{batch + 1}-{batch}{partition}.delta",
                file_bytes=len(data),
                checksum=zlib.crc32(data),
                state_rows=10 * (batch + 1),
                rows_in=5,
                rows_late=shard,
                committed_at_ms=1000 * batch + shard,
            )
            self.objects.put(commit.file, data)
            self.fold(self.ledger.decide_commits([commit])[0])


@pytest.fixture
def state() -> RescaledState:
    return RescaledState()


def test_statistics_of_a_version_are_of_the_shards_that_committed_it(state: RescaledState) -> None:
    versions = version_stats(state.ledger, CREATED, 0, 4, 10)
    figures = [(v.version, v.num_shards, v.state_rows, v.rows_in, v.rows_late, v.committed_at_ms) for v in versions]
    assert figures == [
        (4, 4, 160, 20, 6, 3003),
        (3, 4, 120, 20, 6, 2003),
        (2, 2, 40, 10, 1, 1001),
        (1, 2, 20, 10, 1, 1),
        (0, 2, 0, 0, 0, None),
    ]
    sizes = {info.path: info.size for info in state.objects.list("clicks/0")}
    assert [stats.written_bytes for stats in versions] == [
        sum(size for path, size in sizes.items() if path.rpartition("/")[2].startswith(f"{version}-"))
        for version in (4, 3, 2, 1, 0)
    ]
    assert [stats.version for stats in version_stats(state.ledger, CREATED, 1, 4, 2)] == [4, 3]
    assert [stats.version for stats in version_stats(state.ledger, CREATED, 3, 4, 9)] == [4, 3]


def test_a_version_that_a_programs_partition_did_not_make_has_the_partitions_earlier_rows() -> None:
    ledger = StateLedger("memory:///clicks")
    for run, version, partition in (("run-1", 1, 0), ("run-2", 1, 1), ("run-2", 2, 0)):
        identity = structs.replace(task(run, version - 1, partition), query_id="python")
        records, grant = ledger.decide_lease(identity, actor("a"), FakeFleetView(), stay_else_local)
        commit = structs.replace(
            entry(grant, version), attempt_id=f"{version}{partition}", state_rows=10 * version, rows_in=1
        )
        for record in records:
            ledger.fold(record)
        for record in ledger.decide_commits([commit])[0]:
            ledger.fold(record)
    newest, previous, _ = version_stats(ledger, structs.replace(CREATED, query_id="python"), 0, 2, 9)
    assert (newest.state_rows, newest.rows_in, newest.run_id) == (20 + 10, 1, "run-2")
    assert (previous.state_rows, previous.rows_in, previous.run_id) == (10 + 10, 2, "")


@pytest.mark.parametrize(
    ("path", "lost"),
    [
        ("clicks/0/0/1-00.delta", (1, 2, 3, 4)),
        ("clicks/0/1/2-11.delta", (2, 3, 4)),
        ("clicks/0/3/3-23.delta", (3, 4)),
        ("clicks/0/5/4-35.delta", (4,)),
    ],
)
def test_shards_that_are_made_of_a_damaged_one_are_damaged(
    state: RescaledState, path: str, lost: tuple[int, ...]
) -> None:
    assert check_files(state.objects, files_of(state.objects, "clicks"), lambda size: None).damages == ()
    state.objects.delete(path)
    (damage,) = check_files(state.objects, files_of(state.objects, "clicks"), lambda size: None).damages
    partition = int(path.split("/")[2])
    assert (damage.shard, damage.unreadable) == (partition if partition < 2 else partition - 2, lost)
    assert "cannot go on from its newest version" in damage.advice
