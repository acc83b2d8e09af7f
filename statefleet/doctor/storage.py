"""Checks of a fleet's object store: access, put-if-absent, clock, free space."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from coordinator.model.errors import InvalidRequestError, StateStoreError
from coordinator.model.maintenance import Maintenance
from coordinator.storage.probe import probe
from coordinator.storage.protocol import ObjectStore
from coordinator.storage.uris import normalize_uri, open_object_store
from statefleet.doctor.findings import Finding, Outcome, emit, ok, warning, wrong
from statefleet.doctor.machine import disk_room

#: Difference of clocks that is reported, in seconds. Half the grace period of cleaning is for clocks that differ.
_CLOCK_S = 30.0


def findings(uri: str) -> Iterator[Finding]:
    """Yield the findings of all checks."""
    try:
        normalized = normalize_uri(uri)
        objects = open_object_store(normalized)
    except InvalidRequestError as error:
        yield wrong("object store", f"{uri} cannot be a fleet's URI", str(error))
        return
    if not normalized.startswith("file://"):
        yield from check_store(objects)
        return
    folder = Path(unquote(urlsplit(normalized).path))
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    yield from check_store(objects)
    if folder.is_dir():
        yield disk_room("disk of the store", folder)
    # The checks have created these folders: there is no fleet there yet.
    probes = folder / "_probe"
    for created in (*probes.glob("*"), probes, *missing) if missing else ():
        with suppress(OSError):
            created.rmdir()


def check_store(objects: ObjectStore) -> Iterator[Finding]:
    """Yield whether a store can hold state, and whether its clock agrees with this machine's."""
    begun = time.monotonic()
    try:
        probe(objects)
    except StateStoreError as error:
        yield wrong("object store", f"{objects.uri} cannot hold state", str(error))
        return
    took_ms = 1000 * (time.monotonic() - begun)
    text = f"{objects.uri} can be read and written ({took_ms:.0f} ms for the proof)"
    if objects.tells_writers_apart:
        yield ok("object store", f"{text}; put-if-absent refuses a second writer")
    else:
        yield warning(
            "object store",
            f"{text}, with single_writer: nothing refuses a second writer",
            "run one fleet of this URI at a time, and prefer a store with conditional puts",
        )
    yield clock(objects)


def clock(objects: ObjectStore, now_s: Callable[[], float] = time.time) -> Finding:
    """Return how far the store's clock is from this machine's, by the modification time of an object."""
    path = f"_probe/{uuid.uuid4().hex}/clock"
    before = now_s()
    objects.put(path, b"clock")
    after = now_s()
    try:
        modified_s = next((info.modified_s for info in objects.list(os.path.dirname(path)) if info.path == path), None)
    finally:
        objects.delete(path)
    if modified_s is None:
        return warning(
            "clock", "the store does not list what was just written", "use a store whose listings are current"
        )
    # Modification times are whole seconds.
    off = max(before - 1 - modified_s, modified_s - after - 1, 0.0)
    limit = Maintenance().grace_s / 2
    if off < _CLOCK_S:
        return ok("clock", f"this machine's and the store's differ by less than {max(2, int(off) + 1)} s")
    return Finding(
        "clock",
        Outcome.WRONG if off >= limit else Outcome.WARNING,
        f"this machine's and the store's differ by {off:.0f} s; from {limit:.0f} s on, files may be deleted while they are needed",
        "have every node keep time by NTP (chrony, systemd-timesyncd)",
    )


if __name__ == "__main__":
    emit(findings(sys.argv[1]))
