"""A program that follows the changes of a state, from position to position, and writes down each copy that it reaches.

``python -m tests.integration.follower URI NAME ADDRESS FOLDER``; `ADDRESS` is that of Ray, or ``offline`` to read object storage alone.
It ends once ``FOLDER/stop`` is there and nothing changes any more.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import statefleet as sf


def main(uri: str, name: str, address: str, folder: Path) -> None:
    fleet = sf.attach(uri, offline=True) if address == "offline" else sf.attach(uri, address=address)
    state = fleet.state(name)
    position: int | str = 0
    copy: dict[int, list[int]] = {}
    with (folder / f"{address.partition(':')[0]}.jsonl").open("w") as log:
        while True:
            is_last = (folder / "stop").exists()
            try:
                changed = state.changes(position)
                rows = changed.to_arrow().sort_by("_commit_version").to_pylist()
            except sf.StoreUnavailableError:
                # A store actor or a coordinator was killed just now: nothing of its answer was used.
                continue
            for row in rows:
                copy[row["k"]] = [row["n"], row["w"]]
            position = changed.position
            versions = sorted({row["_commit_version"] for row in rows})
            log.write(json.dumps({"version": changed.version, "versions": versions, "rows": copy}) + "\n")
            if is_last and not rows:
                return
            time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
