"""The view schema of a state's rows: result columns in place of internal ones, and of a key in the view the key columns (leaves) by
which the state's rows are found. Pure logic, and light to import.

``StateSchema.shown`` describes it, as JSON: by the name of a part (``""`` where a state has one list only; ``left`` and ``right`` of a
join; the name of a store of ``transformWithState``) an object with

=============  ============================================================================================
``columns``    keys first: ``name``; ``value``, a tree of :mod:`store_actors.operators.expressions` over the key columns and what is
               emitted of the accumulators (``StateSchema.emitted_fields``), or over the store's columns; ``key``: true of a key, whose
               tree is made of columns and structs only
``where``      tree: which rows are of this part; missing: all
``not_shown``  results that are not among the columns: ``name`` and ``why``; missing: none
``store``      the keyed store that has the rows: ``name``, ``keys``, ``values`` (fields as in the schema), ``due``; missing: they are
               an operator's own
=============  ============================================================================================

Without a description, as in states of the first releases, the view has the columns of ``row_schema``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from coordinator.model.type_names import string_to_type
from store_actors.messages.requests import StoreSpec
from store_actors.operators.expressions import ExpressionTree, Node, NotComputableError

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


@dataclass(frozen=True, slots=True)
class _Plan:
    """The computation of some columns: their trees, the names these read, the columns of the state's rows needed, and the schema."""

    trees: Mapping[str, ExpressionTree]
    read: Set[str]
    needed: tuple[str, ...]
    schema: pa.Schema


class ViewColumns:
    """The view schema of one store of a state.

    Raises
    ------
    InvalidRequestError
        A tree cannot be evaluated.
    """

    def __init__(self, schema: StateSchema, described: Mapping[str, Any]) -> None:
        self._schema = schema
        store = described.get("store")
        #: The keyed store that the rows are of; None if they are an operator's own.
        self.store: StoreSpec | None = None if store is None else _spec(store)
        operator_fields = (*schema.keys, *schema.emitted_fields)
        fields = operator_fields if self.store is None else (*self.store.keys, *self.store.values)
        types = {field.name: string_to_type(field.type) for field in fields}
        try:
            self._trees = {column["name"]: ExpressionTree(column["value"], types) for column in described["columns"]}
            self._where = ExpressionTree(described["where"], types) if "where" in described else None
        except NotComputableError as error:
            raise _refused(error) from error
        self._key_trees: dict[str, Node] = {
            column["name"]: column["value"] for column in described["columns"] if column.get("key", False)
        }
        #: All columns of the view, keys first.
        self.schema = pa.schema([(name, tree.type) for name, tree in self._trees.items()])
        #: Names of the results that are not in the view, with the reason.
        self.not_shown: dict[str, str] = {column["name"]: column["why"] for column in described.get("not_shown", ())}
        self._planned: dict[tuple[str, ...] | None, _Plan] = {}

    @classmethod
    def of(cls, schema: StateSchema, part: str = "") -> ViewColumns:
        """Return the view schema of a state, or of a component of it: a side of a join, a store of ``transformWithState``.

        Raises
        ------
        InvalidRequestError
            There is no such part; names those that there are.
        """
        schema = schema if schema.shown else _undescribed(schema)
        described = schema.shown
        if part not in described:
            raise InvalidRequestError(
                "the state has several lists of rows; say which one to read"
                if len(described) > 1
                else "the state has one list of rows only; leave its name out",
                asked=part,
                there_are=list(described),
            )
        return cls(schema, described[part])

    @staticmethod
    def parts_of(schema: StateSchema) -> tuple[str, ...]:
        """Return the names of a state's components; none where there is only one list of columns."""
        return tuple(name for name in schema.shown if name)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the view's key columns."""
        return tuple(self._key_trees)

    @cached_property
    def _accumulators(self) -> Mapping[str, Accumulator]:
        """Accumulators by the names of the fields that are emitted of them."""
        if self.store is not None:
            return {}
        return {field.name: accumulator for accumulator in self._schema.accumulators for field in accumulator.emitted}

    def needed(self, columns: Sequence[str] | None) -> tuple[str, ...]:
        """Return the columns of the state's rows that these columns of the view (None: all) are computed from.

        Raises
        ------
        InvalidRequestError
            The view has no column of one of the names.
        """
        return self._plan(columns).needed

    def _plan(self, columns: Sequence[str] | None) -> _Plan:
        """Return the plan of some columns. It is cached, since queries of single keys come by the thousand."""
        names = None if columns is None else tuple(columns)
        if (plan := self._planned.get(names)) is None:
            trees, emitted = self._chosen(columns), self._accumulators
            read = set(self._where.columns) if self._where is not None else set()
            read = read.union(*(tree.columns for tree in trees.values()))
            state = {field.name for name in read if name in emitted for field in emitted[name].state}
            stored = [*self._schema.keys, *self._schema.state_fields]
            if self.store is not None:
                stored = [*self.store.keys, *self.store.values]
            needed = tuple(field.name for field in stored if field.name in state or field.name in read)
            schema = pa.schema([(name, tree.type) for name, tree in trees.items()])
            plan = self._planned[names] = _Plan(trees, read, needed, schema)
        return plan

    def _chosen(self, columns: Sequence[str] | None) -> dict[str, ExpressionTree]:
        if columns is None:
            return self._trees
        unknown = [name for name in columns if name not in self._trees]
        if unknown:
            raise InvalidRequestError(
                "the state shows no columns of these names; name some of those that it shows",
                unknown=unknown,
                columns=list(self._trees),
                **({"not_shown": self.not_shown} if self.not_shown else {}),
            )
        return {name: self._trees[name] for name in columns}

    def is_of_part(self, state: pa.Table) -> pa.ChunkedArray | None:
        """Return a mask of the rows (with the columns :meth:`needed`) that are of the component; None if all are."""
        if self._where is None:
            return None
        pieces = [
            pc.fill_null(self._where.array(self._emitted(piece, set(self._where.columns)), piece.num_rows), False)
            for piece in state.to_batches()
        ]
        return pa.chunked_array(pieces, pa.bool_())

    def rows(self, state: pa.Table, columns: Sequence[str] | None) -> pa.Table:
        """Return columns of the view (None: all) of rows of the state, of types as in :attr:`schema`.

        Raises errors as :meth:`needed`.

        Parameters
        ----------
        state
            Rows as they are stored, with at least the columns :meth:`needed`.
        """
        plan = self._plan(columns)
        # Piece by piece: one column of all rows may have more text than Arrow has in a piece.
        batches = [
            self._shown(self._emitted(piece, plan.read), piece.num_rows, plan.trees, plan.schema)
            for piece in state.to_batches()
        ]
        return pa.Table.from_batches(batches, schema=plan.schema)

    def _shown(
        self, columns: Mapping[str, pa.Array], size: int, trees: Mapping[str, ExpressionTree], schema: pa.Schema
    ) -> pa.RecordBatch:
        try:
            if self._where is not None:
                mask = pc.fill_null(self._where.array(columns, size), False)
                columns = {name: column.filter(mask) for name, column in columns.items()}
                size = pc.sum(mask).as_py() or 0
            arrays = [tree.array(columns, size) for tree in trees.values()]
        except NotComputableError as error:
            raise _refused(error) from error
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _emitted(self, rows: pa.RecordBatch, read: Set[str]) -> dict[str, pa.Array]:
        accumulators = {
            id(accumulator): accumulator
            for name, accumulator in self._accumulators.items()
            if name in read and accumulator.result
        }
        columns = {name: column for name, column in zip(rows.schema.names, rows.columns, strict=True) if name in read}
        if not accumulators:
            return columns
        # Late: only views with accumulators need the engine's compiled code.
        from store_actors.operators.aggregate_results import results_of

        state = pa.table(
            {
                field.name: rows.column(field.name)
                for accumulator in accumulators.values()
                for field in accumulator.state
            }
        )
        results = results_of(state, structs.replace(self._schema, keys=(), accumulators=tuple(accumulators.values())))
        return columns | {name: results.column(name).combine_chunks() for name in results.column_names}

    def keys_of(self, leaves: pa.Table) -> pa.Table:
        """Return the view's key columns, of key columns of the state's rows: the inverse of :meth:`key_leaves`."""
        trees = {name: self._trees[name] for name in self._key_trees}
        schema = pa.schema([(name, tree.type) for name, tree in trees.items()])
        batches = []
        for piece in leaves.to_batches():
            columns = dict(zip(piece.schema.names, piece.columns, strict=True))
            arrays = [tree.array(columns, piece.num_rows) for tree in trees.values()]
            batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
        return pa.Table.from_batches(batches, schema=schema)

    def key_leaves(self, keys: pa.Table) -> pa.RecordBatch:
        """Return key columns of the state's rows (``StateSchema.input_keys``, in their order and types), of the view's.

        Parameters
        ----------
        keys
            All key columns of the view, in any order, of types that can be cast. Nulls are keys like others. Floating-point numbers
            become what Spark groups them as.

        Raises
        ------
        InvalidRequestError
            One is missing, unknown, or of another type.
        """
        # Duplicates are compared by the bits of floats, as in Spark.
        normalised = self._schema.operator is not OperatorKind.DEDUPLICATE
        if sorted(keys.column_names) != sorted(self._key_trees):
            raise InvalidRequestError(
                "rows are found by all key columns, and by these only; give each of them once",
                keys=list(self._key_trees),
                missing=[name for name in self._key_trees if name not in keys.column_names],
                unknown=[name for name in keys.column_names if name not in self._key_trees],
            )
        fields = {field.name: field.arrow() for field in self._schema.input_keys}
        columns: dict[str, pa.Array] = {}
        for name, tree in self._key_trees.items():
            chunks = keys.column(name).chunks
            column = (
                chunks[0] if len(chunks) == 1 else pa.concat_arrays([pa.array([], keys.column(name).type), *chunks])
            )
            columns |= _Taken(name, self._trees[name].type, fields).apart(column, tree)
        arrays = [_normalised(columns[name]) if normalised else columns[name] for name in fields]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(list(fields.values())))


def _spec(store: Mapping[str, Any]) -> StoreSpec:
    keys, values = (tuple(Field(**field) for field in store[part]) for part in ("keys", "values"))
    return StoreSpec(store["name"], keys, values, store["due"])


def _undescribed(schema: StateSchema) -> StateSchema:
    """Return the schema with a description that shows the rows as they are stored."""
    accumulators = tuple(structs.replace(accumulator, result=()) for accumulator in schema.accumulators)
    keys = {field.name for field in schema.input_keys}
    named = sorted((*schema.keys, *schema.state_fields), key=lambda field: field.name not in keys)
    columns = [
        {"name": field.name, "value": {"op": "column", "name": field.name}, "key": field.name in keys}
        for field in named
    ]
    return structs.replace(schema, accumulators=accumulators, shown={"": {"columns": columns}})


def _refused(error: NotComputableError) -> InvalidRequestError:
    return InvalidRequestError(
        f"what is shown of the state cannot be computed: {error.reason}; nothing was changed; name other columns",
        part=error.node,
    )


class _Taken:
    """Takes the values of a key column apart."""

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
