"""State that grows with its group: what it costs, how versions keep it, and its files."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs

from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import StateStoreId
from coordinator.model.schema import StateSchema
from coordinator.model.stored_json import from_json
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.serving.files import delta_path, encode_delta
from tests.unit.aggregate_machine import SCHEMA, batch_of, input_of

# -- costs ----------------------------------------------------------------------------------------------------


def words(end: int, texts: Sequence[str]) -> ShardInput:
    return input_of([(end, "a", text, None, None) for text in texts])


def test_an_undo_does_not_copy_the_list_and_garbage_is_let_go() -> None:
    shard = AggregateShard(SCHEMA)
    for version in range(1, 201):
        shard.apply(words(1, [f"word {version} {n}" for n in range(200)]), 0, version)
        shard.commit()
    assert sum(step.nbytes for step in shard.steps()) < 2000
    # 40,000 words in a list and in a set with its index, each in an extent of 65,536; garbage is less than as much again.
    assert shard.table.lists.used < 2 * 3 * 65_536
    ((row,),) = [shard.snapshot().to_pylist()]
    assert len(row["words"]) == len(row["word_set"]) == 40_000


@pytest.mark.parametrize("kept", [7, 8, 9, 30])
def test_a_set_finds_its_elements_after_many_undone_versions(kept: int) -> None:
    """Undone versions leave entries in a set's index, which fill it again and again."""
    shard = AggregateShard(SCHEMA)
    shard.apply(words(1, [f"kept {n}" for n in range(kept)]), 0, 1)
    shard.commit()
    expected = [f"kept {n}" for n in range(kept)]
    for round_ in range(100):
        shard.apply(words(1, [f"undone {round_} {n}" for n in range(6)]), 0, shard.version + 1)
        shard.abort()
        if round_ % 20 == 19:
            more = [f"kept {len(expected)}", *expected]
            shard.apply(words(1, more), 0, shard.version + 1)
            shard.commit()
            expected.append(more[0])
        ((row,),) = [shard.snapshot().to_pylist()]
        assert row["word_set"] == expected


@pytest.mark.parametrize("times", [2048, 4097])
def test_more_strings_in_one_row_than_arrow_counts_are_refused_and_never_written(times: int) -> None:
    """A word that is gathered again and again takes memory once, and its length each time in a file."""
    table = GroupTable(SCHEMA)
    table.accumulate(table.encode(batch_of([(1, "a", "x" * (1 << 20), None, None)])), 1)
    field = table.layout.lists["words"]
    ids = np.full((1, times), table.lists.arena[int(table.rows[0, field.word])])
    table.lists.append(table.rows, np.zeros(times, np.int64), field, ids, np.ones((1, times), np.uint8), 0)
    with pytest.raises(InvalidRequestError, match="bytes of strings in one column"):
        table.decode(table.rows[:1])


# -- files and schemas ------------------------------------------------------------------------------------------------


def test_files_have_arrow_lists_that_any_tool_reads() -> None:
    shard = AggregateShard(SCHEMA)
    change = shard.apply(input_of([(1, "a", "x", None, 0.5), (1, "a", "x", None, None)]), 0, 1)
    data, _ = encode_delta(change, SCHEMA, {})
    rows = pa.ipc.open_file(data).read_all()
    assert rows.column("words").to_pylist() == [["x", "x"]]
    assert rows.schema.field("amounts").type == pa.list_(pa.field("element", pa.decimal128(20, 2), nullable=False))
    assert not rows.schema.field("amounts").nullable
    metadata = json.loads(rows.schema.metadata[b"statefleet"])
    assert from_json(metadata["schema"], StateSchema) == SCHEMA
    spark = {field["name"]: field["type"] for field in metadata["spark"]["fields"]}
    assert spark["xs"] == {"type": "array", "elementType": "double", "containsNull": False}
    assert delta_path(StateStoreId("s", 0, 0), 1, "x").endswith(".delta")


def test_a_global_group_has_empty_lists_before_any_input() -> None:
    shard = AggregateShard(structs.replace(SCHEMA, keys=(), expiry_key=None))
    change = shard.apply(ShardInput.of_raw(shard.schema), 0, 1)
    (row,) = change.delta.drop_columns([CHANGE_COLUMN]).to_pylist()
    assert row == {"words": [], "top": None, "word_set": [], "amounts": [], "xs": []}
