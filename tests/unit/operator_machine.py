"""Base of the state machines of operators: versions of a shard against a model of each."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from coordinator.model.errors import InvalidRequestError
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED, Change
from store_actors.messages.requests import ShardInput
from tests.unit.shard_machine import ShardMachine

Model = TypeVar("Model")


class OperatorMachine(ShardMachine, Generic[Model]):
    """A shard of an operator that is committed, aborted, rolled back, and loaded from its deltas or a snapshot.

    An operator gives :meth:`new_shard`, :meth:`no_rows` and :meth:`check`. It calls :meth:`begin` in its constructor or in an initial
    rule, and has a rule that applies rows (:meth:`apply_input`) and keeps the change with its model (:meth:`applied`).

    Attributes
    ----------
    models, changes
        Model of each version, and the change that made it.
    pending
        Change that is neither committed nor aborted, with the model of the shard after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[int, Model] = {}
        self.changes: dict[int, Change] = {}
        self.pending: tuple[Change, Model] | None = None

    # -- for the operator --------------------------------------------------------------------------------------------

    def new_shard(self) -> Any:
        """Return an empty shard of the operator."""
        raise NotImplementedError

    def no_rows(self) -> ShardInput:
        """Return an input without rows."""
        raise NotImplementedError

    def check(self, model: Model) -> None:
        """Compare the newest rows of the shard, pending ones included, with a model."""
        raise NotImplementedError

    # -- versions -------------------------------------------------------------------------------------------------

    def begin(self, empty: Model) -> None:
        """Start at version 0, with its model."""
        self.shard = self.new_shard()
        self.models[0] = empty
        assert len(self.shard) == 0

    @property
    def newest(self) -> Model:
        """Model of the newest committed version."""
        return self.models[self.shard.version]

    @property
    def watermark_ms(self) -> int:
        """Watermark of the newest committed version."""
        version = self.shard.version
        return self.changes[version].watermark_ms if version else 0

    def apply_input(self, rows: ShardInput, watermark_ms: int) -> Change:
        """Apply rows as the next version, and return the change."""
        change: Change = self.shard.apply(rows, watermark_ms, self.shard.version + 1)
        note(f"version {change.version}: {change.delta.to_pylist()}")
        assert (change.rows_in, change.watermark_ms) == (rows.rows_read, watermark_ms)
        return change

    def applied(self, change: Change, model: Model) -> None:
        """Keep a pending change, and the model of the shard with it."""
        self.pending = (change, model)

    @precondition(lambda self: self.pending is not None)
    @rule()
    def apply_twice_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="uncommitted"):
            self.shard.apply(self.no_rows(), 0, self.shard.version + 1)

    @precondition(lambda self: self.pending is not None)
    @rule()
    def commit(self) -> None:
        assert self.pending is not None
        change, model = self.pending
        assert self.shard.commit() == change.version
        self.models[change.version], self.changes[change.version] = model, change
        self.pending = None

    @precondition(lambda self: self.pending is not None)
    @rule()
    def abort(self) -> None:
        self.shard.abort()
        self.pending = None

    @rule(back=st.integers(-1, 4))
    def rollback(self, back: int) -> None:
        """Go back to a version that is in memory, and to no other, nor on to one; a pending change is dropped."""
        newest = self.shard.version
        version = max(0, newest - back)
        is_retained = version in self.retained()[0]
        assert self.shard.rollback(version) is is_retained
        assert self.shard.version == (version if is_retained else newest)
        self.pending = None

    @precondition(lambda self: self.pending is None)
    @rule(from_snapshot=st.booleans())
    def reload(self, from_snapshot: bool) -> None:
        """Load a new shard, from a snapshot of the newest version or from every delta."""
        fresh, version = self.new_shard(), self.shard.version
        if from_snapshot:
            rows = self.shard.snapshot()
            kinds = pa.array(np.full(len(rows), UPDATED), pa.int8())
            fresh.load(rows.append_column(CHANGE_COLUMN, kinds), version, self.watermark_ms)
        else:
            for change in (self.changes[number] for number in range(1, version + 1)):
                fresh.load(change.delta, change.version, change.watermark_ms)
        assert (fresh.version, fresh.watermark_ms) == (version, self.watermark_ms)
        self.shard = fresh

    @invariant()
    def equals_model(self) -> None:
        self.check(self.newest if self.pending is None else self.pending[1])
        if self.pending is None:
            assert self.shard.watermark_ms == self.watermark_ms
