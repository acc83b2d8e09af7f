"""A program that follows the changes of a state, from position to position, and writes down each copy that it reaches.

``python -m tests.integration.follower URI NAME ADDRESS FOLDER``; `ADDRESS` is that of Ray, or ``offline`` to read object storage alone.
It ends once ``FOLDER/stop`` is there and nothing changes any more.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import statefleet as sf


class Follower:
    """Keeps a copy of a state by its changes, from position to position: the values of each key."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._position: int | str = 0
        self.rows: dict[int, list[int]] = {}

    def follow(self) -> tuple[int, list[int]]:
        """Take what changed; return the version that the copy is of now, and of which versions the changes were."""
        changed = self._state.changes(self._position)
        rows = changed.to_arrow().sort_by("_commit_version").to_pylist()
        for row in rows:
            if row["_change_type"] == "delete":
                del self.rows[row["k"]]
            else:
                self.rows[row["k"]] = [value for name, value in row.items() if name != "k" and not name.startswith("_")]
        self._position = changed.position
        return changed.version, sorted({row["_commit_version"] for row in rows})


def main(uri: str, name: str, address: str, folder: Path) -> None:
    fleet = sf.attach(uri, offline=True) if address == "offline" else sf.attach(uri, address=address)
    follower = Follower(fleet.state(name))
    with (folder / f"{address.partition(':')[0]}.jsonl").open("w") as log:
        while True:
            is_last = (folder / "stop").exists()
            try:
                version, versions = follower.follow()
            except sf.StoreUnavailableError:
                # A store actor or a coordinator was killed just now: nothing of its answer was used.
                continue
            log.write(json.dumps({"version": version, "versions": versions, "rows": follower.rows}) + "\n")
            if is_last and not versions:
                return
            time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
