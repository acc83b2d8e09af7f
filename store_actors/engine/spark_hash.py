"""Spark's ``hash`` of columns (``Murmur3Hash``, seed 42) of Arrow data: which shard the rows of a key are on.

Rules of Spark 3.5's ``HashExpression``: columns are taken in one after the other, each hash being the seed of the next; null changes
nothing. Booleans, integers of up to 32 bits and dates are hashed as 32-bit integers; longer integers, timestamps and day-time spans as
64-bit ones; floats by their bits, with one NaN and one zero; decimals of up to 18 digits as 64-bit integers, longer ones as the bytes
of Java's ``BigInteger``; arrays by their elements, structs by their fields, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from store_actors.engine import murmur_kernels
from store_actors.engine.arrays import Bytes, Mask, Slots

#: Spark's seed.
SEED = 42

Hashes = npt.NDArray[np.uint32]
#: Digits of a decimal that Spark hashes as a long (``Decimal.MAX_LONG_DIGITS``).
_LONG_DIGITS = 18
#: The one NaN of Java's ``floatToIntBits`` and ``doubleToLongBits``.
_SINGLE_NAN, _DOUBLE_NAN = 0x7FC00000, 0x7FF8000000000000
_TEXTS = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)


def spark_hash(rows: pa.Table | pa.RecordBatch, columns: Sequence[str]) -> npt.NDArray[np.int32]:
    """Return Spark's ``hash(columns)`` of each row.

    Parameters
    ----------
    rows
        Columns of the types that a state holds (:mod:`coordinator.model.type_names`).
    columns
        Names, in the order in which Spark is given them. Without any the hash is the seed.

    Returns
    -------
    numpy.ndarray of int32, shape (rows,)

    Raises
    ------
    TypeError
        A type that Spark does not hash (a map), or that no state holds.
    """
    chosen = rows.select(list(columns))
    batches = chosen.to_batches() if isinstance(chosen, pa.Table) else [chosen]
    parts = [_of_batch(batch) for batch in batches]
    if not parts or not chosen.num_columns:
        # Arrow forgets how many rows there are of no columns.
        return np.full(rows.num_rows, SEED, np.int32)
    return np.concatenate(parts).view(np.int32)


def shards_of(rows: pa.Table | pa.RecordBatch, columns: Sequence[str], num_shards: int) -> npt.NDArray[np.int32]:
    """Shard of each row where rows are partitioned by ``pmod(hash(columns), num_shards)``, as Spark's hash partitioning does."""
    return np.mod(spark_hash(rows, columns), np.int32(num_shards))


def _of_batch(batch: pa.RecordBatch) -> Hashes:
    hashes = np.full(batch.num_rows, SEED, np.uint32)
    begins = np.arange(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        _hashed(column).carry(hashes, begins, begins + 1)
    return hashes


@dataclass(frozen=True, slots=True)
class _Atomic:
    """Values of an atomic type: a loop with what it reads."""

    kernel: Callable[..., None]
    buffers: tuple[npt.NDArray[Any], ...]

    def carry(self, hashes: Hashes, begins: Slots, ends: Slots) -> None:
        """Carry hashes on, in place, each by the values between two places (of which null ones change nothing)."""
        self.kernel(hashes, begins, ends, *self.buffers)


@dataclass(frozen=True, slots=True)
class _Nested:
    """Structs, or arrays: values that are hashed by their parts."""

    #: The fields of structs; the elements of arrays.
    parts: tuple[_Atomic | _Nested, ...]
    #: Where the elements of each array begin, and those of the last one end; None of structs.
    offsets: Slots | None
    is_valid: Mask

    def carry(self, hashes: Hashes, begins: Slots, ends: Slots) -> None:
        # By the first value of each row, then by the second one of those that have one, and so on.
        rows, positions = np.arange(len(hashes)), begins
        while True:
            more = positions < ends[rows]
            rows, positions = rows[more], positions[more]
            if not len(rows):
                return
            is_valid = self.is_valid[positions]
            self._carry_one(hashes, rows[is_valid], positions[is_valid])
            positions = positions + 1

    def _carry_one(self, hashes: Hashes, rows: Slots, positions: Slots) -> None:
        row_hashes = hashes[rows]
        begins, ends = positions, positions + 1
        if self.offsets is not None:
            begins, ends = self.offsets[positions], self.offsets[positions + 1]
        for part in self.parts:
            part.carry(row_hashes, begins, ends)
        hashes[rows] = row_hashes


def _hashed(values: pa.Array) -> _Atomic | _Nested:
    kind, valid = values.type, _valid(values)
    if pa.types.is_struct(kind):
        # Without the nulls of the struct: where it is null, its fields are not read.
        fields = tuple(_hashed(values.field(number)) for number in range(kind.num_fields))
        return _Nested(fields, None, valid.view(np.bool_))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _Nested((_hashed(values.values),), _offsets(values), valid.view(np.bool_))
    if pa.types.is_decimal128(kind):
        words = _buffer(values, np.dtype(np.uint64), 2)
        if kind.precision <= _LONG_DIGITS:
            return _Atomic(murmur_kernels.hash_longs, (np.ascontiguousarray(words[::2]), valid))
        return _Atomic(murmur_kernels.hash_wide, (words.view(np.uint8), valid))
    if any(is_of(kind) for is_of in _TEXTS):
        data = values.buffers()[2]
        content = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
        return _Atomic(murmur_kernels.hash_bytes, (_offsets(values), content, valid))
    numbers = _numbers(values)
    kernel = murmur_kernels.hash_ints if numbers.dtype == np.int32 else murmur_kernels.hash_longs
    return _Atomic(kernel, (numbers, valid))


def _numbers(values: pa.Array) -> npt.NDArray[Any]:
    """Return the numbers of an atomic type, as 32 or 64 bits; any number where a value is null."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return values.cast(pa.int32()).fill_null(0).to_numpy()  # type: ignore[no-any-return]
    if pa.types.is_floating(kind) and kind.bit_width > 16:
        return _float_words(values)
    if pa.types.is_signed_integer(kind) and kind.bit_width < 32:
        return _buffer(values, np.dtype(f"i{kind.bit_width // 8}")).astype(np.int32)
    if kind == pa.int32() or pa.types.is_date32(kind):
        return _buffer(values, np.dtype(np.int32))
    counts_microseconds = (pa.types.is_timestamp(kind) or pa.types.is_duration(kind)) and kind.unit == "us"
    if kind == pa.int64() or counts_microseconds:
        return _buffer(values, np.dtype(np.uint64))
    raise TypeError(f"Spark does not hash values of this type, or no state holds them: {kind}")


def _float_words(values: pa.Array) -> npt.NDArray[Any]:
    single = values.type.bit_width == 32
    numbers = _buffer(values, np.dtype(np.float32 if single else np.float64))
    words: npt.NDArray[Any] = numbers.view(np.int32 if single else np.uint64).copy()
    words[numbers == 0] = 0
    words[np.isnan(numbers)] = _SINGLE_NAN if single else _DOUBLE_NAN
    return words


def _offsets(values: pa.Array) -> Slots:
    large = (
        pa.types.is_large_list(values.type)
        or pa.types.is_large_string(values.type)
        or pa.types.is_large_binary(values.type)
    )
    kind = np.dtype(np.int64 if large else np.int32)
    return _buffer(values, kind, more=1).astype(np.int64)


def _valid(values: pa.Array) -> Bytes:
    """Return 1 for each value that is not null, else 0."""
    if values.null_count == 0:
        return np.ones(len(values), np.uint8)
    return pc.is_valid(values).to_numpy(zero_copy_only=False).view(np.uint8)  # type: ignore[no-any-return]


def _buffer(values: pa.Array, kind: np.dtype[Any], each: int = 1, more: int = 0) -> npt.NDArray[Any]:
    """Return the numbers that an array holds: `each` a value, and `more` after the last one."""
    count, first = each * len(values) + more, each * values.offset
    data = values.buffers()[1]
    if data is None or not len(values):
        # An empty array need not have any.
        return np.zeros(count, kind)
    return np.frombuffer(data, kind, count, first * kind.itemsize)
