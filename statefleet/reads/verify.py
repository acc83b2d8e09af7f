"""Check of every file that the retained versions of a state need: damaged and missing files, and the versions that need them.

Nothing is written, and no fleet needs to run. A running fleet deletes files meanwhile: a file that seems to be missing is checked
against the log once more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from coordinator.ledger.records import Committed
from coordinator.ledger.rescaling import first_layout
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.log_end import seq_of
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry, SnapshotEntry, StoredFile
from coordinator.model.errors import CorruptStateError, NewerFormatError
from coordinator.model.names import is_state_name
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Runtime
from coordinator.storage.protocol import ObjectStore
from store_actors.serving.files import decode_file
from store_actors.serving.loading import MemoryRows, NoSnapshotError, reading_order

#: Files that are read at once; each may be as large as a piece of a snapshot.
_THREADS = 4
_AHEAD = 8

_RESTORE = "restore the file from a backup of the object store"


@dataclass(frozen=True, slots=True)
class NeededFile:
    """A file that a retained version needs."""

    path: str
    kind: str
    #: Bytes according to the log; None for a file of the log, which contains its own checksum.
    size: int | None = None
    #: Commit or snapshot of the file; None for a file of the log.
    entry: CommitEntry | SnapshotEntry | None = None
    piece: StoredFile | None = None


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that cannot be used."""

    file: str
    #: ``delta``, ``snapshot``, ``log record``, ``checkpoint``, ``part of a checkpoint`` or ``metadata``.
    kind: str
    problem: str
    state: str
    #: ``shard``, ``store``, ``version``: Shard, store and version of its rows; None for a file of the log.
    shard: int | None = None
    store: str | None = None
    version: int | None = None
    #: Retained versions of the shard, or of shards made from it, that cannot be read any more; empty if other files replace it.
    unreadable: tuple[int, ...] = ()
    advice: str = _RESTORE


@dataclass(frozen=True, slots=True)
class StateFiles:
    """The files of a state that are checked."""

    name: str
    created: StateMetadata | None
    #: The ledger; None if the log cannot be read.
    ledger: StateLedger | None
    files: tuple[NeededFile, ...]
    damages: tuple[Damage, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files whose size is known beforehand."""
        return sum(file.size or 0 for file in self.files)


@dataclass(frozen=True, slots=True)
class StateCheck:
    """The result of checking a state."""

    name: str
    files: int
    size: int
    damages: tuple[Damage, ...]


def state_names(objects: ObjectStore) -> list[str]:
    """Return the names of the states, also of those whose metadata are missing or damaged; other folders are left out."""
    return [name for name in objects.folders() if is_state_name(name) and _is_state(objects, name)]


def _is_state(objects: ObjectStore, name: str) -> bool:
    """Return whether a folder has more than the remaining files of a dropped state or a deleted branch."""
    log = ManifestLog(objects, name, "")
    try:
        metadata = log.load_metadata()
        if metadata is None and not objects.list(f"{name}/manifest"):
            return False
        ledger = log.load()
    except (CorruptStateError, NewerFormatError):
        return True
    if metadata is None:
        return ledger.has_versions() or bool(ledger.run_id) or ledger.origin is not None
    return not ledger.is_dropped or metadata.state_id != (ledger.dropped_metadata or {}).get("state_id", "")


def files_of(objects: ObjectStore, name: str) -> StateFiles:
    """Return the files that the retained versions of a state need, according to the log now."""
    log = ManifestLog(objects, name, "")
    metadata = NeededFile(f"{name}/metadata.json", "metadata")
    try:
        created = log.load_metadata()
    except (CorruptStateError, NewerFormatError):
        created = None  # it is reported as a damaged file
    try:
        ledger = log.load()
    except (CorruptStateError, NewerFormatError) as error:
        if error.context.get("field") == "state_id" and _agrees(objects, name):
            # All records are of one state, which is not that of the metadata.
            damage = Damage(metadata.path, "metadata", _problem(error, "state_id"), name, advice=_RESTORE)
            return StateFiles(name, created, None, (metadata,), (damage,))
        damage = Damage(
            str(error.context["file"]),
            "log record",
            _problem(error),
            name,
            advice=f"no version of the state can be trusted without it; {_RESTORE}",
        )
        return StateFiles(name, created, None, (metadata,), (damage,))
    files = (metadata, *_log_files(objects, log, ledger), *_data_files(ledger))
    return StateFiles(name, created, ledger, files)


def _agrees(objects: ObjectStore, name: str) -> bool:
    """Return whether the files of a state's log belong together, even if its metadata do not."""
    try:
        ManifestLog(objects, name, "").load()
    except (CorruptStateError, NewerFormatError):
        return False
    return True


def _log_files(objects: ObjectStore, log: ManifestLog, ledger: StateLedger) -> Iterator[NeededFile]:
    """Yield the files of the log from the second newest whole checkpoint on, also those that are missing."""
    name = ledger.state_name
    infos = [info for folder in ("manifest", "checkpoints", "parts") for info in objects.list(f"{name}/{folder}")]
    needed = log.needed(infos)
    listed = {info.path for info in infos}
    numbers = [seq_of(path) for path in listed if "/manifest/" in path]
    begin = needed.seq + 1 if needed.seq else min(numbers, default=1)
    if sum("/checkpoints/" in path for path in listed) < 2 and not ledger.drops:
        # Nothing was deleted yet: the record before the first one that exists has to exist, too.
        begin = max(1, begin - 1)
    for number in range(begin, log.seq + 1):
        yield NeededFile(f"{name}/manifest/{number:020d}.json", "log record")
    for path in sorted(listed):
        if "/checkpoints/" in path and seq_of(path) >= needed.seq:
            yield NeededFile(path, "checkpoint")
    for path in sorted(needed.parts if needed.seq else [path for path in listed if "/parts/" in path]):
        yield NeededFile(path, "part of a checkpoint")


def _data_files(ledger: StateLedger) -> Iterator[NeededFile]:
    for record in ledger.retained():
        if isinstance(record, Committed):
            yield NeededFile(record.entry.file, "delta", record.entry.file_bytes, record.entry)
        else:
            for piece in record.snapshot.pieces:
                yield NeededFile(piece.file, "snapshot", piece.file_bytes, record.snapshot, piece)


def check_files(objects: ObjectStore, state: StateFiles, checked: Callable[[int], object]) -> StateCheck:
    """Read and check the files of a state.

    `checked` is called after each file, with the bytes so far of all files whose size is known beforehand.
    """
    problems: list[tuple[NeededFile, str]] = []
    size = done = 0
    log = ManifestLog(objects, state.name, "")
    with suppress(CorruptStateError, NewerFormatError):  # it is one of the files
        log.load_metadata()
    for file, read, problem in _read_all(objects, log, state.files):
        size += read
        if problem:
            problems.append((file, problem))
        done += file.size or 0
        checked(done)
    if problems:
        # A running fleet deletes files meanwhile, and its log goes on.
        again = files_of(objects, state.name)
        needed = {file.path for file in again.files}
        problems = [(file, problem) for file, problem in problems if file.path in needed]
        state = replace(state, created=again.created or state.created, ledger=again.ledger, damages=again.damages)
    damages = (*state.damages, *_damages(state, problems))
    return StateCheck(state.name, len(state.files), size, damages)


def _read_all(
    objects: ObjectStore, log: ManifestLog, files: Sequence[NeededFile]
) -> Iterator[tuple[NeededFile, int, str]]:
    """Yield files in their order, with their sizes and their problems; a few are read at once."""
    remaining = iter(files)
    pool = Runtime().threads.pool(_THREADS, "statefleet-verify")

    def begun(file: NeededFile) -> tuple[NeededFile, Callable[[], tuple[int, str]]]:
        return file, pool.submit(_check, objects, log, file).result

    waiting = deque(map(begun, islice(remaining, _AHEAD)))
    while waiting:
        file, result = waiting.popleft()
        waiting.extend(map(begun, islice(remaining, 1)))
        yield file, *result()


def _check(objects: ObjectStore, log: ManifestLog, file: NeededFile) -> tuple[int, str]:
    """Return the size of a file, and its problem; empty if it has none."""
    try:
        data = objects.get(file.path)
    except FileNotFoundError:
        return 0, "it is missing"
    try:
        if file.entry is not None:
            decode_file(data, file.entry, file.piece)
        else:
            log.check_file(file.path)
    except CorruptStateError as error:
        if file.size not in (None, len(data)):
            return len(data), f"it has {len(data)} bytes instead of {file.size}"
        needed = error.context.get("file")
        return len(data), _problem(error) if needed == file.path else f"it needs {needed}, of which: {_problem(error)}"
    except NewerFormatError as error:
        return len(data), _problem(error)
    except RecursionError:
        return len(data), "its checksum differs, or it is no JSON"
    return len(data), ""


def _problem(error: CorruptStateError | NewerFormatError, of_metadata: str = "") -> str:
    """Return the problem of a file in a few words; for metadata, `of_metadata` is the field that differs from the log."""
    facts = error.context
    if of_metadata:
        return f"it belongs elsewhere: its {of_metadata} is {facts['expected']} and that of the log {facts['says']}"
    if isinstance(error, NewerFormatError):
        return f"a later release wrote it (format {facts['format']}, and this release knows {facts['known_up_to']})"
    if "known" in facts:
        return f"it is of format {facts['format']}, which no release wrote (this one reads format {facts['known']})"
    if facts.get("field") == "previous":
        folder, _, number = str(facts["file"]).removesuffix(".json").rpartition("/")
        before = f"{folder}/{int(number) - 1:020d}.json"
        return f"it was not written after {before} as that is there: one of the two belongs elsewhere"
    if "says" in facts:
        return f"it belongs elsewhere: its {facts['field']} is {facts['says']} and not {facts['expected']}"
    return "it is missing or unreadable, or its checksum differs"


def _damages(state: StateFiles, problems: Sequence[tuple[NeededFile, str]]) -> Iterator[Damage]:
    broken = {file.path for file, _ in problems}
    reported = {damage.file for damage in state.damages}
    for file, problem in problems:
        if file.path in reported:
            continue
        damage = Damage(file.path, file.kind, problem, state.name)
        if file.entry is not None and state.ledger is not None:
            yield _data_damage(state, state.ledger, damage, file.entry, broken)
        elif file.kind in ("checkpoint", "part of a checkpoint") and state.ledger is not None:
            advice = f"every version can be read, as the log before it is whole; the next checkpoints replace it; or {_RESTORE}"
            yield replace(damage, advice=advice)
        elif file.kind == "log record" and state.ledger is not None:
            advice = f"every version can be read, as a checkpoint has what it says; keep the checkpoints, or {_RESTORE}"
            yield replace(damage, advice=advice)
        elif file.kind == "metadata" and state.created is None:
            yield replace(damage, advice=f"{_RESTORE}, or free the name of what is left by `statefleet drop`")
        else:
            yield damage


def _data_damage(
    state: StateFiles, ledger: StateLedger, damage: Damage, entry: CommitEntry | SnapshotEntry, broken: set[str]
) -> Damage:
    """Return the damage of a delta or snapshot, with the versions that cannot be read any more, and advice."""
    created = state.created
    layout = ledger.layouts.of(entry.partition_id) or (first_layout(created) if created else ShardLayout(0))
    lost = sorted(
        {
            version
            for partition in _with_descendants(ledger, entry.partition_id)
            for version in _unreadable(ledger, partition, entry.store_name, broken)
        }
    )
    newest = max(ledger.newest_version(partition) for partition in _with_descendants(ledger, entry.partition_id))
    if not lost:
        advice = "every version can be read without it; it goes once newer snapshots are made"
    elif newest in lost:
        advice = f"the query cannot go on from its newest version; {_RESTORE} before it is started again"
    else:
        advice = f"newer versions do without it, so the query goes on; {_RESTORE} if the older ones matter"
    return replace(
        damage,
        shard=entry.partition_id - layout.first_partition,
        store=entry.store_name,
        version=entry.version,
        unreadable=tuple(lost),
        advice=advice,
    )


def _with_descendants(ledger: StateLedger, partition: int) -> Iterator[int]:
    """Yield a partition, those that were made from it, those made from these, and so on."""
    yield partition
    for layout in ledger.layouts.made_of(partition):
        for child in layout.children(partition):
            yield from _with_descendants(ledger, child)


def _unreadable(ledger: StateLedger, partition: int, store_name: str, broken: set[str]) -> Iterator[int]:
    """Yield the versions of a store that cannot be loaded without the broken files."""
    for version in range(ledger.oldest_readable(partition), ledger.newest_version(partition) + 1):
        plan = ledger.load_plans(partition, version, (store_name,)).plans[store_name]
        snapshots = (snapshot for part in plan.parts() for snapshot in part.snapshots)
        skipped = {snapshot.file for snapshot in snapshots if not broken.isdisjoint(snapshot.files)}
        try:
            steps = reading_order(plan, skipped, None)
        except NoSnapshotError:
            yield version
            continue
        if any(not isinstance(step.source, MemoryRows) and step.source.file in broken for step in steps):
            yield version
