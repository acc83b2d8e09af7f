"""A rescaled state with checkpoints in parts, as an earlier commit wrote it (tests/data): read, continued and checked."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.log.sealed_json import unseal
from coordinator.model.errors import CorruptStateError
from coordinator.model.identities import StateStoreId
from coordinator.storage.memory import MemoryObjectStore
from statefleet.reads.verify import check_files, files_of
from store_actors.messages import ShardInput
from tests.stored_shards import stored_rows
from tests.unit.aggregation_fleet import LocalCoordinator
from tests.unit.rescaled_query import SUMS, RescaledQuery, row_counts

FOLDER = Path(__file__).parents[1] / "data" / "state-15ad431"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
NEWEST: int = EXPECTED["newest"]
#: The last version of the first two shards.
RESCALED_AT = 9


def stored() -> MemoryObjectStore:
    objects = MemoryObjectStore()
    for file in sorted((FOLDER / "s").rglob("*")):
        if file.is_file():
            objects.put(str(file.relative_to(FOLDER)), file.read_bytes())
    return objects


def opened(objects: MemoryObjectStore) -> RescaledQuery:
    """Return the query after its newest batch."""
    query = RescaledQuery(SUMS, 2)
    query.fleet.objects = objects
    query.fleet.coordinator = LocalCoordinator(objects, checkpoint_interval=16, part_records=4)
    query.batch, query.run = NEWEST, EXPECTED["run"]
    query.layout = query.submit(lambda ledger: ([], ledger.layouts.newest(ShardLayout(2))))
    return query


def rows_of(query: RescaledQuery, version: int) -> Counter[str]:
    rows: Counter[str] = Counter()
    partitions = (0, 1) if version <= RESCALED_AT else query.layout.partitions
    for partition in partitions:
        store_id = StateStoreId(query.submit(lambda ledger: ([], ledger.root)), 0, partition)
        rows += row_counts(stored_rows(query.fleet.new_store(), store_id, version, SUMS))
    return rows


def damaged(objects: MemoryObjectStore) -> tuple[str, ...]:
    return tuple(
        f"{damage.file}: {damage.problem}" for damage in check_files(objects, files_of(objects, "s"), print).damages
    )


def paths(objects: MemoryObjectStore, folder: str, ending: str = "") -> list[str]:
    return sorted(info.path for info in objects.list(f"s/{folder}") if info.path.endswith(ending))


def test_only_checkpoints_in_parts_have_the_rescale_and_every_version_has_the_same_rows() -> None:
    objects = stored()
    assert not any("rescaled" in objects.get(path).decode() for path in paths(objects, "manifest"))
    assert all(unseal(objects.get(path))["parts"] for path in paths(objects, "checkpoints"))
    query = opened(objects)
    assert query.layout.num_shards == 3
    for version in range(1, NEWEST + 1):
        assert rows_of(query, version) == Counter(EXPECTED["rows"][str(version)]), f"version {version}"
    assert damaged(objects) == ()


def test_a_run_of_this_release_continues_it_over_a_checkpoint_and_a_rescale() -> None:
    objects = stored()
    query, before = opened(objects), set(paths(objects, ""))
    query.run += "+"
    store, added = query.fleet.new_store(), 0
    for num_shards in (3, 2):
        if num_shards != query.layout.num_shards:
            query.rescale(num_shards)
        for _ in range(3):
            added += 1
            row = {"k": "later", "f": 0.5, "v": added}
            rows = pa.RecordBatch.from_pylist([row], schema=SUMS.raw_schema())
            query.apply(ShardInput.of_raw(SUMS, rows), 0, store)
    query.fleet.coordinator.restart()
    (new_row,) = query.state() - Counter(EXPECTED["rows"][str(NEWEST)])
    assert "('a0_sum', 21)" in new_row
    assert not Counter(EXPECTED["rows"][str(NEWEST)]) - query.state()
    assert any("/checkpoints/" in path for path in set(paths(objects, "")) - before)
    assert damaged(objects) == ()


@pytest.mark.parametrize(
    ("folder", "ending"), [("manifest", ""), ("parts", ""), ("0/2", ".delta"), ("0/0", ".snapshot")]
)
@pytest.mark.parametrize("is_swap", [False, True])
def test_files_of_format_1_in_the_wrong_place_give_no_wrong_rows_and_are_named(
    folder: str, ending: str, is_swap: bool
) -> None:
    objects = stored()
    first, second = paths(objects, folder, ending)[-2:]
    first_data, second_data = objects.get(first), objects.get(second)
    objects.put(second, first_data)
    if is_swap:
        objects.put(first, second_data)
    problems = list(damaged(objects))
    assert any(first in problem or second in problem for problem in problems), problems
    try:
        query = opened(objects)
        rows_by_version = {version: rows_of(query, version) for version in range(1, NEWEST + 1)}
    except CorruptStateError as error:
        problems = [str(error)]
    else:
        assert rows_by_version == {version: Counter(EXPECTED["rows"][str(version)]) for version in rows_by_version}
    assert any(first in problem or second in problem for problem in problems), problems
