"""From the key columns of a view to the key columns (leaves) by which a state's rows are found. Pure logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Field
from store_actors.operators.expressions import Node

#: Types between which a key's values may be cast, each family by itself.
_FAMILIES = (
    lambda kind: pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind),
    lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind),
    lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind),
    lambda kind: pa.types.is_timestamp(kind) or pa.types.is_date(kind),
    pa.types.is_duration,
    pa.types.is_boolean,
    lambda kind: pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind),
    pa.types.is_struct,
)


def leaves_of_keys(
    keys: pa.Table,
    trees: Mapping[str, Node],
    types: Mapping[str, pa.DataType],
    leaves: Sequence[Field],
    *,
    normalised: bool,
) -> pa.RecordBatch:
    """Return the key leaves, in their order and types, of a view's key columns.

    Parameters
    ----------
    trees, types
        Tree and type of each key column of the view.
    leaves
        The state's key leaves.
    normalised
        Whether floating-point numbers become what Spark groups them as: one NaN, and -0.0 is 0.0.

    Raises
    ------
    InvalidRequestError
        A key is missing, unknown, or of another type.
    """
    if sorted(keys.column_names) != sorted(trees):
        raise InvalidRequestError(
            "rows are found by all key columns, and by these only; give each of them once",
            keys=list(trees),
            missing=[name for name in trees if name not in keys.column_names],
            unknown=[name for name in keys.column_names if name not in trees],
        )
    fields = {field.name: field.arrow() for field in leaves}
    columns: dict[str, pa.Array] = {}
    for name, tree in trees.items():
        chunks = keys.column(name).chunks
        column = chunks[0] if len(chunks) == 1 else pa.concat_arrays([pa.array([], keys.column(name).type), *chunks])
        columns |= _Taken(name, types[name], fields).apart(column, tree)
    arrays = [_normalised(columns[field.name]) if normalised else columns[field.name] for field in leaves]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(list(fields.values())))


class _Taken:
    """Takes the values of a key column apart.

    Parameters
    ----------
    name, kind
        Name and type of the column.
    fields
        The state's key leaves.
    """

    def __init__(self, name: str, kind: pa.DataType, fields: Mapping[str, pa.Field]) -> None:
        self._name, self._kind, self._fields = name, kind, fields

    def apart(self, values: pa.Array, tree: Node) -> dict[str, pa.Array]:
        """Return the leaves, by name, from which a tree computes the values."""
        if tree["op"] == "column":
            field = self._fields[tree["name"]]
            return {field.name: self._cast(values, field.type)}
        if not pa.types.is_struct(values.type) and not pa.types.is_null(values.type):
            raise self._refused(values.type)
        columns: dict[str, pa.Array] = {}
        if (null := tree.get("null")) is not None:
            is_null = pc.is_null(values)
            # If a null key equals no other key, the leaf itself is null where the key is.
            null_leaf = (
                pc.if_else(is_null, pa.scalar(None, pa.bool_()), is_null) if self._fields[null].nullable else is_null
            )
            columns[null] = null_leaf
        for name, inner in zip(tree["names"], tree["args"], strict=True):
            columns |= self.apart(self._part(values, name), inner)
        return columns

    def _part(self, values: pa.Array, name: str) -> pa.Array:
        if pa.types.is_null(values.type):
            return values
        index = values.type.get_field_index(name)
        if index < 0:
            raise self._refused(values.type)
        return pc.struct_field(values, index)

    def _cast(self, values: pa.Array, target: pa.DataType) -> pa.Array:
        if values.type == target:
            return values
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if not (pa.types.is_null(values.type) or any(of(values.type) and of(target) for of in _FAMILIES)):
            raise self._refused(values.type)
        # A float may be given as a double.
        is_safe = not (pa.types.is_float32(target) and pa.types.is_floating(values.type))
        try:
            return pc.cast(values, target, safe=is_safe)
        except pa.ArrowException as error:
            raise self._refused(values.type, str(error)) from error

    def _refused(self, actual: pa.DataType, reason: str = "") -> InvalidRequestError:
        return InvalidRequestError(
            "a key is of another type; give values of its own",
            key=self._name,
            type=self._kind,
            given=actual,
            **({"reason": reason} if reason else {}),
        )


def _normalised(values: pa.Array) -> pa.Array:
    """Return values with their floating-point numbers, also inside lists and structs, as Spark groups them."""
    kind = values.type
    if pa.types.is_floating(kind):
        nan = pa.scalar(np.nan, kind)
        # -0.0 + 0.0 is 0.0.
        return pc.if_else(pc.is_nan(values), nan, pc.add(values, pa.scalar(0.0, kind)))
    if pa.types.is_list(kind):
        lengths = np.asarray(pc.fill_null(pc.list_value_length(values), 0))
        ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        return pa.ListArray.from_arrays(ends, _normalised(values.flatten()), type=kind, mask=pc.is_null(values))
    if pa.types.is_struct(kind):
        parts = [_normalised(part) for part in values.flatten()]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=pc.is_null(values))
    return values
