"""The view of a state for readers without Spark (:mod:`store_actors.operators.view_columns`), described when a query is built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import msgspec

from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.expression_trees import Node
from spark_jobs.plan.keys import Key
from store_actors.messages.requests import StoreSpec


def column(name: str) -> Node:
    """Return the tree of a column."""
    return {"op": "column", "name": name}


@dataclass
class ViewComponent:
    """A table of a state's view.

    Attributes
    ----------
    where
        Condition for the state's rows that it has; None for all.
    store
        The keyed store with its rows; None if they are an operator's own rows.
    """

    where: Node | None = None
    store: StoreSpec | None = None
    _keys: list[Node] = field(default_factory=list)
    _columns: list[Node] = field(default_factory=list)
    _not_shown: list[Node] = field(default_factory=list)

    @classmethod
    def of_keys(cls, keys: Iterable[Key], attributes: Sequence[Expression] = ()) -> ViewComponent:
        """Return a component with these keys, each named as the first attribute that equals it, or else as Spark names it."""
        component = cls()
        for key in keys:
            equal = (attribute for attribute in attributes if attribute.matches(key.expression))
            component.key(next(equal, key.expression).column_name, key.tree.view_tree())
        return component

    def key(self, name: str, tree: Node) -> None:
        """Add a key column; one whose name is taken gets a number, as rows are found by all keys."""
        candidates = chain([name], (f"{name}_{number}" for number in count(2)))
        free = next(candidate for candidate in candidates if not self._has(candidate))
        self._keys.append({"name": free, "value": tree, "key": True})

    def value(self, name: str, tree: Node, *, of: str = "") -> None:
        """Add another column of the user's; if its name is taken, it is prefixed with the name of what it is `of`."""
        if of and self._has(name):
            name = f"{of}.{name}"
        if self._is_free(name):
            self._columns.append({"name": name, "value": tree})

    def extra(self, name: str, tree: Node) -> None:
        """Add a column that the user does not have; if its name is taken, it gets another."""
        self.value(f"__{name}" if self._has(name) else name, tree)

    def leave_out(self, name: str, why: str) -> None:
        """Record a column that is not shown."""
        self._not_shown.append({"name": name, "why": why})

    def _has(self, name: str) -> bool:
        return any(entry["name"] == name for entry in (*self._keys, *self._columns))

    def _is_free(self, name: str) -> bool:
        if self._has(name):
            self.leave_out(name, "another column has this name")
            return False
        return True

    def to_json(self) -> dict[str, Any]:
        """Return the component as JSON values."""
        description: dict[str, Any] = {"columns": [*self._keys, *self._columns]}
        if self.where is not None:
            description["where"] = self.where
        if self._not_shown:
            description["not_shown"] = self._not_shown
        if self.store is not None:
            # Lists, as JSON restores them.
            description["store"] = msgspec.json.decode(msgspec.json.encode(self.store))
        return description
