"""Nodes that shall have no shards, kept in the object store: a coordinator that starts anew still knows them. No Ray."""

from __future__ import annotations

import re

from coordinator.model.errors import InvalidRequestError
from coordinator.storage.protocol import ObjectStore

__all__ = ["DrainedNodes"]

_FOLDER = "_drained"
#: Ray's ids of nodes.
_NODE_ID = re.compile(r"[0-9A-Za-z_-]{1,128}")


class DrainedNodes:
    """One empty object a node, ``_drained/<node id>``.

    Ray never uses an id again, so what is left of a node that has ended keeps no other one empty.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def node_ids(self) -> set[str]:
        """Ids of all that were drained and not taken back."""
        return {info.path.rpartition("/")[2] for info in self._store.list(_FOLDER)}

    def add(self, node_id: str) -> None:
        """Keep it, durably.

        Raises
        ------
        InvalidRequestError
            It is no id.
        StorageUnavailableError
            The store failed; it may be kept or not.
        """
        # Whoever writes it at once writes the same.
        self._store.put(_path(node_id), b"")

    def remove(self, node_id: str) -> None:
        """Take it back; nothing happens if it was never drained."""
        self._store.delete(_path(node_id))


def _path(node_id: str) -> str:
    if _NODE_ID.fullmatch(node_id) is None:
        raise InvalidRequestError("this is no id of a Ray node; nothing was changed", node=node_id)
    return f"{_FOLDER}/{node_id}"
