"""What readers are shown of a state without Spark (:mod:`store_actors.operators.view_columns`), written down when a query is built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, count
from typing import Any

from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.expression_trees import Node
from spark_jobs.plan.keys import Key
from store_actors.messages import StoreSpec

__all__ = ["ViewComponent", "column"]


def column(name: str) -> Node:
    """The tree of a column."""
    return {"op": "column", "name": name}


@dataclass
class ViewComponent:
    """One list of rows, as a reader is shown it.

    Attributes
    ----------
    where
        Which of the state's rows it has; None: all.
    store
        The keyed store that has them; None if they are an operator's own rows.
    """

    where: Node | None = None
    store: StoreSpec | None = None
    _keys: list[Node] = field(default_factory=list)
    _columns: list[Node] = field(default_factory=list)
    _not_shown: list[Node] = field(default_factory=list)

    @classmethod
    def of_keys(cls, keys: Iterable[Key], attributes: Sequence[Expression] = ()) -> ViewComponent:
        """One with these keys, each under the name of the first of some attributes that it is, or that Spark gives it."""
        part = cls()
        for key in keys:
            own = (one for one in attributes if one.matches(key.expression))
            part.key(next(own, key.expression).column_name, key.tree.shown_tree())
        return part

    def key(self, name: str, tree: Node) -> None:
        """Show a key column; of several of one name all, as rows are found by all of them."""
        told = next(one for one in chain([name], (f"{name}_{number}" for number in count(2))) if not self._has(one))
        self._keys.append({"name": told, "value": tree, "key": True})

    def value(self, name: str, tree: Node, *, of: str = "") -> None:
        """Show another column of the user's; under the name of what it is `of`, too, if there is one of its name."""
        if of and self._has(name):
            name = f"{of}.{name}"
        if self._is_free(name):
            self._columns.append({"name": name, "value": tree})

    def extra(self, name: str, tree: Node) -> None:
        """Show what no column of the user's tells, under a name that gives way to the user's."""
        self.value(f"__{name}" if self._has(name) else name, tree)

    def leave_out(self, name: str, why: str) -> None:
        """Tell of a column that is not shown."""
        self._not_shown.append({"name": name, "why": why})

    def _has(self, name: str) -> bool:
        return any(one["name"] == name for one in (*self._keys, *self._columns))

    def _is_free(self, name: str) -> bool:
        if self._has(name):
            self.leave_out(name, "another column has this name")
            return False
        return True

    def to_json(self) -> dict[str, Any]:
        """The part of the description."""
        told: dict[str, Any] = {"columns": [*self._keys, *self._columns]}
        if self.where is not None:
            told["where"] = self.where
        if self._not_shown:
            told["not_shown"] = self._not_shown
        if self.store is not None:
            # Lists, as they are read again.
            told["store"] = asdict(self.store, dict_factory=_with_lists)
        return told


def _with_lists(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items}
