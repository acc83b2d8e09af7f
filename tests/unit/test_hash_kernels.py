"""Indexes are hashed under a secret: keys that are chosen to collide do not collide."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import ROW_COLUMN, Accumulator, Field, StateSchema
from coordinator.runtime.runtime import Runtime
from store_actors.engine import hash_kernels
from store_actors.engine.arrays import Words
from store_actors.engine.index_kernels import grow_index
from store_actors.engine.multimap import MultimapTable
from store_actors.engine.strings import StringPool
from store_actors.engine.table import GroupTable
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.serving.keyed_stores import KeyedStores
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.unit.aggregation_fleet import AggregationFleet, rows
from tests.unit.keyed_fleet import KeyedFleet

SEEDS = st.integers(0, 2**128 - 1)
WORDS = st.integers(0, 2**64 - 1)
COUNT = 40_000
#: The hash of earlier versions, which any user can invert.
_SEED, _C1, _C2 = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_MASK = 2**64 - 1


def unmixed(values: Words) -> Words:
    """Return the words that MurmurHash3's unkeyed 64-bit finaliser turns into these values."""
    for factor in (_C2, _C1):
        values = values ^ (values >> np.uint64(33))
        values = values * np.uint64(pow(factor, -1, 2**64))
    return values ^ (values >> np.uint64(33))


def chosen(start: int) -> Words:
    """Return words that an unkeyed ``mix(mix(start ^ word) + seed) >> 32`` puts all into one slot."""
    one_tag = (np.uint64(12345) << np.uint64(32)) | np.arange(COUNT, dtype=np.uint64)
    return unmixed(unmixed(one_tag) - np.uint64(_SEED)) ^ np.uint64(start)


def homes(index: Words) -> npt.NDArray[np.int64]:
    """Return the slots at which the entries of an index are looked up first."""
    tags = index[np.flatnonzero(index)] >> np.uint64(32)
    return ((tags * np.uint64(len(index))) >> np.uint64(32)).astype(np.int64)


def probes(index: Words) -> int:
    """Return the number of slots that are probed to find every entry of an index."""
    return int(((np.flatnonzero(index) - homes(index)) % len(index) + 1).sum())


def keyed(*, chained: bool = False) -> StateSchema:
    rows = (Field(ROW_COLUMN, "int64"),) if chained else ()
    return StateSchema.keyed((Field("k", "int64"), *rows), (Field("v", "int64"),))


def rows_of(table: GroupTable, keys: Words) -> Words:
    """Return whole rows with these keys (each is row 0 where rows share a key)."""
    rows = np.zeros((len(keys), table.layout.row_words), np.uint64)
    rows[:, table.layout.flag_words] = keys
    return rows


@pytest.mark.parametrize("seed", [0, 1, 2**128 - 1])
def test_chosen_keys_are_found_at_once(seed: int) -> None:
    table = GroupTable(keyed(), seed)
    rows = rows_of(table, chosen(_SEED))
    table.put(rows)
    assert probes(table._index) < 2 * COUNT
    assert (table.find(rows) == np.arange(COUNT)).all()
    chains = MultimapTable(keyed(chained=True), seed)
    chains.put(rows_of(chains, chosen(_SEED)))
    assert probes(chains._heads) < 2 * COUNT
    # Strings of 8 bytes, as the hash of earlier versions began with the length.
    pool, data = StringPool(seed), chosen(_SEED ^ 8).view(np.uint8).copy()
    ids = pool.ids(data, np.arange(COUNT + 1) * 8, np.ones(COUNT, np.uint8))
    assert probes(pool._index) < 2 * COUNT
    assert (ids == np.arange(COUNT)).all()
    # Elements of a set: the slot of one was the lower bits of its hash, shifted by one.
    elements = unmixed(np.arange(COUNT, dtype=np.uint64) << np.uint64(40)) ^ np.uint64(_SEED)
    secret = hash_kernels.secret_words(seed, "elements", hash_kernels.ELEMENT_SECRETS)
    slots = {int(hash_kernels.hash_element(element, np.uint64(0), 1, secret)) & 0xFFFF for element in elements.tolist()}
    assert len(slots) > COUNT // 2


def test_ascending_keys_are_spread() -> None:
    for seed in range(20):
        table = GroupTable(keyed(), seed)
        table.put(rows_of(table, np.arange(COUNT, dtype=np.uint64)))
        assert probes(table._index) < 3 * COUNT, seed


@settings(deadline=None)
@given(SEEDS, st.binary(max_size=40))
def test_a_string_is_hashed_as_its_polynomial_says(seed: int, text: bytes) -> None:
    secret = hash_kernels.secret_words(seed, "strings", hash_kernels.STRING_SECRETS)
    point, *pair = (int(word) for word in secret)
    prime, total = 2**61 - 1, len(text)
    for begin in range(0, len(text), 7):
        total = (total + int.from_bytes(text[begin : begin + 7], "little")) * (point & prime) % prime
    expected = scattered(((pair[0] + (pair[1] + total % 2**32) * (pair[2] + (total >> 32))) & _MASK) >> 32)
    data = np.frombuffer(b"before" + text + b"after", np.uint8).copy()
    assert hash_kernels.hash_string(data, 6, 6 + len(text), secret) == expected


@settings(deadline=None)
@given(SEEDS, st.lists(WORDS, max_size=4), st.integers(0, 2**31 - 1))
def test_a_row_is_hashed_by_one_product_a_word(seed: int, words: list[int], nulls: int) -> None:
    secret = hash_kernels.secret_words(seed, "rows", hash_kernels.row_secrets(len(words)))
    drawn = [int(secret_word) for secret_word in secret]
    total = drawn[0] + drawn[1] * nulls
    for index, word in enumerate(words):
        total += (drawn[2 + 2 * index] + word % 2**32) * (drawn[3 + 2 * index] + (word >> 32))
    row = np.array([[7, *words]], np.uint64)
    assert hash_kernels.hash_row(row, 0, 1, len(words), np.uint64(nulls), secret) == scattered((total & _MASK) >> 32)
    if len(words) == 2:
        low, high = (np.uint64(value) for value in words)
        total = drawn[0] + sum(
            (drawn[1 + 2 * index] + word % 2**32) * (drawn[2 + 2 * index] + (word >> 32))
            for index, word in enumerate(words)
        )
        assert hash_kernels.hash_element(low, high, 2, secret) == scattered((total & _MASK) >> 32)


def scattered(value: int) -> int:
    value ^= value >> 16
    value = value * 0x85EBCA6B % 2**32
    value ^= value >> 13
    value = value * 0xC2B2AE35 % 2**32
    return value ^ (value >> 16)


def test_secrets_follow_from_the_seed_and_their_use() -> None:
    drawn = [
        hash_kernels.secret_words(seed, use, 3).tolist() for seed, use in ((1, "a"), (1, "b"), (2, "a"), (2**127, "a"))
    ]
    assert len({word for words in drawn for word in words}) == 12
    assert hash_kernels.secret_words(1, "a", 3).tolist() == drawn[0]


COUNTS = StateSchema(
    (Field("k", "string"),),
    (Field("v", "string"),),
    (Accumulator(AccumulatorKind.COLLECT_SET, ("v",), (Field("a0_values", "list<string>"),)),),
    None,
    None,
    "update",
)


def test_no_output_depends_on_the_seed() -> None:
    tables_by_seed: list[list[pa.Table]] = []
    for seed in (0, 1, 2**100 + 7):
        shard, tables = AggregateShard(COUNTS, seed), []
        for version in range(1, 6):
            words = [f"{version * number % 97}" for number in range(500)]
            batch = pa.record_batch({"k": words, "v": [f"v{number * version % 13}" for number in range(500)]})
            tables.append(shard.apply(ShardInput.of_raw(COUNTS, batch), 0, version).delta)
            shard.commit()
        tables_by_seed.append([*tables, shard.snapshot()])
    assert tables_by_seed[0] == tables_by_seed[1] == tables_by_seed[2]


def test_each_process_has_its_own_seed() -> None:
    assert len({Runtime().hash_seed for _ in range(10)}) == 10
    assert "hash_seed" not in repr(Runtime())


def test_a_store_actor_holds_its_shards_under_its_seed() -> None:
    fleet, runtime = AggregationFleet(), Runtime(hash_seed=7)
    shards = OperatorShards(Partitions(fleet.objects, fleet.coordinator, runtime=runtime))
    shards.apply(fleet.request(0), rows("ab"))
    assert [partition.stores["default"].table.seed for _, partition in shards.partitions.cache.items()] == [7]
    keyed_fleet = KeyedFleet()
    stores = KeyedStores(Partitions(keyed_fleet.objects, keyed_fleet.coordinator, StoreMetrics(), runtime))
    stores.open_update(keyed_fleet.request(0))
    assert [partition.stores["default"]._table.table.seed for _, partition in stores.partitions.cache.items()] == [7]


def reached(index: Words) -> bool:
    """Whether no place between the home of an entry and the entry is empty."""
    entries, first = np.flatnonzero(index), homes(index)
    places = np.where(entries < first, entries + len(index), entries)
    full = np.concatenate([[0], np.cumsum(np.tile(index != 0, 2))])
    return bool((full[places + 1] - full[first] == places + 1 - first).all())


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(2**32 - 2**24, 2**32 - 1), min_size=1), st.integers(1, 50))
def test_every_entry_is_reached_from_its_home_after_growth(tags: list[int], more: int) -> None:
    entries = np.array([tag << 32 | slot + 1 for slot, tag in enumerate(tags)], np.uint64)
    index = np.zeros(len(tags) + 1, np.uint64)
    for entry in entries:
        grow_index(np.array([entry]), index)
    larger, in_pieces = np.zeros(len(index) + more, np.uint64), np.zeros(len(index) + more, np.uint64)
    grow_index(index, larger)
    for piece in np.array_split(index, 3):
        grow_index(piece, in_pieces)
    for grown in (index, larger, in_pieces):
        assert reached(grown)
        assert np.array_equal(np.sort(grown[grown != 0]), np.sort(entries))
