"""Nodes that are to have no shards, kept in the object store, so that a restarted coordinator still knows them. No Ray."""

from __future__ import annotations

import re

from coordinator.model.errors import InvalidRequestError
from coordinator.storage.protocol import ObjectStore

_FOLDER = "_drained"
#: Ray's ids of nodes.
_NODE_ID = re.compile(r"[0-9A-Za-z_-]{1,128}")


class DrainedNodes:
    """The drained nodes: for each an empty object, ``_drained/<node id>``.

    Ray never uses an id again, so the object of a node that has ended affects no other node.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def node_ids(self) -> set[str]:
        """Return the ids of the drained nodes."""
        return {info.path.rpartition("/")[2] for info in self._store.list(_FOLDER)}

    def add(self, node_id: str) -> None:
        """Mark a node as drained, durably.

        Raises
        ------
        InvalidRequestError
            This is not an id of a node.
        StorageUnavailableError
            The store failed; the node may be marked or not.
        """
        # A concurrent writer writes the same.
        self._store.put(_path(node_id), b"")

    def remove(self, node_id: str) -> None:
        """Remove the mark; nothing happens if the node was not drained."""
        self._store.delete(_path(node_id))


def _path(node_id: str) -> str:
    if _NODE_ID.fullmatch(node_id) is None:
        raise InvalidRequestError("this is no id of a Ray node; nothing was changed", node=node_id)
    return f"{_FOLDER}/{node_id}"
