"""How the rows of a state are asked for, and where the rows of a key are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.ledger.read_views import ReadView
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.schema import OperatorKind, StateSchema
from store_actors.engine.spark_hash import shards_of
from store_actors.key_queries import is_few
from store_actors.messages import ReadProjection
from store_actors.operators.view_columns import ViewColumns

__all__ = ["Projection", "form_of", "named_part", "parts_of"]


@dataclass(frozen=True)
class Projection:
    """What readers of one part of a state go by.

    Attributes
    ----------
    store_name
        Store that has the rows.
    shown
        Columns of the rows.
    routing
        Key columns, as state holds them, by whose hash rows are on shards; none where any shard may have any row.
    has_one
        Whether a key has one row at most.
    """

    read: ReadProjection
    store_name: str
    shown: ViewColumns
    routing: tuple[str, ...]
    has_one: bool
    _encoded: dict[tuple[str, ...] | None, bytes] = field(default_factory=dict)

    def asking(self, columns: Sequence[str] | None) -> bytes:
        """The form for some columns, as it is sent.

        Raises
        ------
        InvalidRequestError
            There are no such columns.
        """
        wanted = None if columns is None else tuple(columns)
        if wanted not in self._encoded:
            self._check(wanted or ())
            self._encoded[wanted] = replace(self.read, columns=wanted).encoded()
        return self._encoded[wanted]

    def filtering(
        self, columns: Sequence[str] | None, chosen: pc.Expression | None, filtered: Sequence[str] | None
    ) -> bytes:
        """The form of a scan, as it is sent."""
        if chosen is None:
            return self.asking(columns)
        self._check((*(columns or ()), *(filtered or ())))
        wanted = None if columns is None else tuple(columns)
        of_filter = None if filtered is None else tuple(filtered)
        return replace(self.read, columns=wanted, filter=chosen, filtered=of_filter).encoded()

    def _check(self, columns: Sequence[str]) -> None:
        unknown = [name for name in columns if name not in self.shown.schema.names]
        if unknown:
            raise InvalidRequestError(
                "the state has no such columns",
                unknown=", ".join(unknown),
                columns=", ".join(self.shown.schema.names),
            )

    def by_shard(
        self, view: ReadView, leaves: pa.RecordBatch, shards: npt.NDArray[Any] | None
    ) -> dict[int, tuple[npt.NDArray[np.int64], pa.Table]]:
        """For each shard that may have rows of some keys, by what :meth:`shards_of` says of them: places of its keys, and these."""
        there = view.written
        if shards is None:
            every, keys = np.arange(leaves.num_rows), pa.Table.from_batches([leaves])
            return {shard: (every, keys) for shard in there if leaves.num_rows}
        order = np.argsort(shards, kind="stable")
        begins = np.searchsorted(shards[order], np.arange(len(view.versions) + 1))
        # Few are put in order at once; of many, a slice would travel with all that it is a part of.
        are_few = is_few(leaves)
        in_order = leaves.take(pa.array(order)) if are_few and leaves.num_rows > 1 else leaves
        found = {}
        for shard in there:
            begin, end = begins[shard], begins[shard + 1]
            if begin < end:
                places = order[begin:end]
                # Of keys that are all on one shard nothing need be copied: the order is theirs.
                if len(places) == leaves.num_rows:
                    own = leaves
                else:
                    own = in_order.slice(begin, end - begin) if are_few else leaves.take(pa.array(places))
                found[shard] = places, pa.Table.from_batches([own])
        return found

    def shards_of(self, view: ReadView, leaves: pa.RecordBatch) -> npt.NDArray[Any] | None:
        """Of each key the shard that its rows are on; None where any shard may have them."""
        if len(view.versions) == 1:
            return np.zeros(leaves.num_rows, np.int64)
        return shards_of(leaves, self.routing, len(view.versions)) if self.routing else None


def parts_of(view: ReadView) -> tuple[str, ...]:
    """Names of the parts of a state, one of which is read; none if there is only one."""
    schema = view.metadata.schema
    if schema is None or schema.operator is OperatorKind.PARTITIONS:
        return view.stores if view.stores != (DEFAULT_STORE,) else ()
    return ViewColumns.parts_of(schema)


def form_of(view: ReadView, part: str, described: StateSchema | None) -> Projection | None:
    """How a part of a state is read.

    Parameters
    ----------
    described
        Columns of a keyed store that only its user knows.

    Returns
    -------
    Form or None
        None if these must be known first.

    Raises
    ------
    InvalidRequestError
        The state has no such part, or has several and none is named.
    """
    part = named_part(view, part)
    schema = view.metadata.schema
    if schema is None or schema.operator is OperatorKind.PARTITIONS:
        if described is None:
            return None
        read = ReadProjection(None)
        return Projection(read, part or DEFAULT_STORE, ViewColumns.of(described), (), True)
    shown = ViewColumns.of(schema, part)
    keys = schema.keys if shown.store is None else shown.store.keys
    has_one = len(keys) == len(schema.input_keys)
    read = ReadProjection(schema, part)
    store_name = DEFAULT_STORE if shown.store is None else shown.store.name
    # A function's keyed stores are on the shards of its keys, which is not what their own schema says.
    routing = tuple(key.name for key in schema.input_keys)
    return Projection(read, store_name, shown, routing, has_one)


def named_part(view: ReadView, part: str) -> str:
    """A part by its name, or by what stands after its kind: ``count`` is ``value.count`` if no other variable is called so.

    Raises
    ------
    InvalidRequestError
        The state has no such part, or has several and none is named.
    """
    parts = parts_of(view)
    named = [one for one in parts if one == part] or [one for one in parts if one.partition(".")[2] == part != ""]
    if part != "" or parts:
        if len(named) == 1:
            return named[0]
        raise InvalidRequestError(
            "the state has several parts; name one: fleet.state(name, part)"
            if parts
            else "the state has only one part; name none",
            state=view.metadata.state_name,
            part=part,
            parts=", ".join(parts),
        )
    return part
