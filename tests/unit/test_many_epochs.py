"""Thousands of epochs of a second: which files they leave, when large shards get snapshots, and which versions stay."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pytest

from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.log.cleaner import Cleaner
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.model.identities import StateStoreId
from coordinator.model.maintenance import Maintenance
from coordinator.runtime.runtime import Clock, Runtime
from store_actors.messages.requests import ShardInput
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.stored_shards import stored_rows
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, counts, rows
from tests.unit.observed_objects import ObservedObjectStore

SHARDS = 2


class Now(Clock):
    """A clock that a test sets."""

    now = 1_000_000.0

    def elapsed_s(self) -> float:
        return self.now

    def now_s(self) -> float:
        return self.now


class DatedObjects(ObservedObjectStore):
    """Objects whose times are those of a clock."""

    def __init__(self, clock: Now) -> None:
        super().__init__()
        self._clock = clock

    def put(self, path: str, data: bytes) -> None:
        super().put(path, data)
        self._modified_s[path] = self._clock.now

    def put_if_absent(self, path: str, data: bytes) -> bool:
        is_new = super().put_if_absent(path, data)
        if is_new:
            self._modified_s[path] = self._clock.now
        return is_new


class EpochFleet(AggregationFleet):
    """A continuous query on shards in this process, and their maintenance, by a clock that only epochs move."""

    objects: DatedObjects

    def __init__(self, maintenance: Maintenance, first: ShardInput) -> None:
        self.clock, self.maintenance, self._first = Now(), maintenance, first
        super().__init__(DatedObjects(self.clock))
        self._cleaner = Cleaner(self.objects, maintenance, self.clock, self._writer_of, self._not_deleted)
        self._rounds_s = self.clock.now
        #: Requests of maintenance so far, by kind.
        self.requests: Counter[str] = Counter()

    def new_store(self) -> OperatorShards:
        return OperatorShards(Partitions(self.objects, self.coordinator, runtime=Runtime(clock=self.clock)))

    async def _writer_of(self, _name: str) -> LedgerWriter:
        return self.coordinator._writer

    async def _not_deleted(self, _name: str) -> None:
        pass

    def run(self, epochs: range, epoch_s: float) -> Iterator[Counter[str]]:
        """Run epochs; after each round of maintenance yield the number of files by kind."""
        for epoch in epochs:
            for shard in range(SHARDS):
                request = self.request(epoch, shard=shard)
                self.store.apply(request, self._first if epoch == 0 else rows("abc"))
            ended, layout = request.task, ShardLayout(SHARDS, 0)
            self.coordinator.decide(lambda ledger: (ledger.decide_epoch(ended, layout, "{}"), None))  # noqa: B023
            self.clock.now += epoch_s
            if self.clock.now - self._rounds_s >= self.maintenance.interval_s:
                self._rounds_s = self.clock.now
                yield self._round()

    def _round(self) -> Counter[str]:
        begun = len(self.objects.requests)
        self.store.partitions.maintain(self.maintenance.min_deltas_for_snapshot)
        self.coordinator._do(self._cleaner.round(self.coordinator._writer, "s"))
        self.requests.update(kind for kind, _ in self.objects.requests[begun:])
        return Counter(re.sub(r"^s/(\d/\d/.*\.)?", "", info.path).split("/")[0] for info in self.objects.list("s"))

    def snapshots(self) -> list[int]:
        """Return the versions of all snapshots that were written of the first shard."""
        puts = (path for kind, path in self.objects.requests if kind == "put" and path.endswith(".snapshot"))
        return [int(path.rsplit("/", 1)[1].split("-")[0]) for path in puts if path.startswith("s/0/0/")]


def many(groups: int) -> ShardInput:
    return ShardInput.of_raw(SCHEMA, pa.record_batch({"v": pa.array(map(str, range(groups)))}))


@pytest.mark.parametrize("epoch_s", [1.0, pytest.param(0.2, marks=pytest.mark.soak)])
def test_epochs_leave_the_files_of_the_grace_period_and_few_requests(epoch_s: float) -> None:
    maintenance = Maintenance(interval_s=10, grace_s=100)
    fleet = EpochFleet(maintenance, rows("abc"))
    found = list(fleet.run(range(round(500 / epoch_s)), epoch_s))
    # Files of a quarter of a grace period wait for the next listing, those of a round or two for the next snapshot.
    kept_s = 1.25 * maintenance.grace_s + 3 * maintenance.interval_s
    for files in found:
        assert files["delta"] <= SHARDS * kept_s / epoch_s
        # A record for each shard's commit (of one store actor they are one) and one for the epoch.
        assert files["manifest"] <= 1.1 * (SHARDS + 1) * (kept_s + 128 * epoch_s) / epoch_s
        assert files["snapshot"] + files["checkpoints"] + files["parts"] <= 0.05 * files.total() + 30
    assert found[-1].total() <= 1.1 * found[len(found) // 2].total(), "they do not grow"
    rounds = len(found)
    assert fleet.requests.total() <= 15 * rounds
    assert fleet.requests["list"] <= 2 + rounds


def test_a_large_shard_whose_epochs_change_little_is_not_written_each_round() -> None:
    fleet = EpochFleet(Maintenance(interval_s=10), many(40_000))
    for _ in fleet.run(range(310), 1):
        pass
    assert fleet.snapshots() == [100, 200, 300]
    store = fleet.new_store()
    assert counts(stored_rows(store, StateStoreId("memory:///s", 0, 0), 310, SCHEMA))["a"] == 309
    assert (store.metrics.snapshots_loaded, store.metrics.deltas_loaded) == (1, 10)


def test_a_large_shard_that_was_loaded_or_changes_much_gets_its_snapshot_at_once() -> None:
    fleet = EpochFleet(Maintenance(interval_s=10), many(40_000))
    for _ in fleet.run(range(20), 1):
        pass
    assert fleet.snapshots() == []
    fleet.store = fleet.new_store()
    for _ in fleet.run(range(20, 30), 1):
        pass
    assert fleet.snapshots() == [30], "how large the files are that it replayed is not known"
    for epoch in range(30, 40):
        fleet.store.apply(fleet.request(epoch), many(40_000))
    fleet.store.partitions.maintain(10)
    assert fleet.snapshots() == [30, 40]


@pytest.mark.parametrize(("retain_s", "oldest"), [(0, 500), (300, 300)])
def test_versions_stay_readable_by_number_and_by_time(retain_s: float, oldest: int) -> None:
    fleet = EpochFleet(Maintenance(interval_s=20, retain_s=retain_s), rows("abc"))
    for _ in fleet.run(range(600), 1):
        pass
    assert fleet.coordinator.read(lambda ledger: ledger._oldest_retained[0, "default"]) == oldest
