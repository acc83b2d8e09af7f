"""Conditions over pairs of rows of a join: trees of :mod:`store_actors.operators.expressions`. Pure logic."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from coordinator.model.errors import InvalidRequestError
from store_actors.engine.arrays import Mask
from store_actors.operators.expressions import ExpressionTree, Node, NotComputableError


class PairCondition:
    """A compiled condition.

    Raises
    ------
    InvalidRequestError
        The tree has an unknown operation or column, or types that do not go together.
    """

    def __init__(self, tree: Node, types: Mapping[str, pa.DataType]) -> None:
        try:
            self._tree = ExpressionTree(tree, types)
            if not pa.types.is_boolean(self._tree.type):
                raise NotComputableError(tree, f"it gives {self._tree.type}, not booleans")
        except NotComputableError as error:
            raise _refused(error) from error
        #: Names of the columns that it reads.
        self.columns: tuple[str, ...] = self._tree.columns

    def holds(self, columns: Mapping[str, pa.Array], size: int) -> Mask:
        """Return a mask of the pairs, `size` in number, for which the condition is true; null is not true."""
        try:
            result = self._tree.values(columns, size)
        except NotComputableError as error:
            raise _refused(error) from error
        if isinstance(result, pa.Scalar):
            return np.full(size, result.as_py() is True)
        return np.asarray(result.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def _refused(error: NotComputableError) -> InvalidRequestError:
    return InvalidRequestError(
        f"a part of a join's condition cannot be evaluated: {error.reason}; nothing was changed; give that part as a column of one "
        "side",
        part=error.node,
    )
