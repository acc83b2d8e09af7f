"""Calls of a session, answered by handles in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from store_actors.keyed.update_handle import UpdateHandle


def answer(handles: Mapping[str, UpdateHandle], kind: str, *args: Any) -> Any:
    """Return a store actor's answer to a session's call or commit; the writes that come with it are carried out first."""
    *call, writes = args
    for name, method, inner in writes:
        getattr(handles[name], method)(*inner)
    if kind == "commit_session":
        return max(handle.commit().version for handle in handles.values())
    name, method, inner = call
    return getattr(handles[name], method)(*inner)
