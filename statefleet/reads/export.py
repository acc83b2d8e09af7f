"""Export of the rows of a scan to Parquet, a piece at a time. A file has its final name only once it is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from coordinator.model.errors import InvalidRequestError, SetupError
from coordinator.runtime.runtime import random_id
from statefleet.reads.rows import Rows

#: Called with the number of shards that are written.
Progress = Callable[[int], object]


def export_parquet(rows: Rows, target: Path, progress: Progress, *, overwrite: bool = False) -> int:
    """Write rows to a Parquet file, or to a folder with a file for each shard; return their number. `progress` is called after each
    shard.

    The target is a file if the name ends in ``.parquet`` and no folder has that name; else a folder. One that exists is refused, unless
    it is to be overwritten. Raises InvalidRequestError if the name is taken, or its folder does not exist, or Parquet has no type for a
    column; SetupError if the disk failed. Nothing was written under the name then.
    """
    is_file = target.suffix == ".parquet" and not target.is_dir()
    if target.exists() and not overwrite:
        raise InvalidRequestError(
            "there is something of that name already; nothing was written; choose another name, or overwrite it",
            target=target,
        )
    if not target.absolute().parent.is_dir():
        raise InvalidRequestError(
            "the folder to write to is not there; nothing was written; make it first", target=target
        )
    # In the same folder, since a rename is atomic only within a file system.
    temporary = target.absolute().with_name(f".{target.name}.{random_id()}.tmp")
    try:
        if is_file:
            written = _write_file(rows, range(rows.num_shards), temporary, progress)
        else:
            written = _write_folder(rows, temporary, progress)
        _put_in_place(temporary, target)
    except pa.ArrowNotImplementedError as error:
        raise InvalidRequestError(
            "Parquet has no type for a column; nothing was written; leave it out", target=target, cause=error
        ) from error
    except OSError as error:
        raise SetupError(
            "the export cannot be written; nothing of its name was changed; check the folder and the room on its disk",
            target=target,
            cause=error,
        ) from error
    finally:
        _remove(temporary)
    return written


def _write_file(rows: Rows, shards: Iterable[int], file: Path, progress: Progress) -> int:
    count = 0
    with pq.ParquetWriter(file, rows.schema) as writer:
        for shard in shards:
            for table in rows.of_shard(shard):
                writer.write_table(table)
                count += table.num_rows
            progress(shard + 1)
    _sync(file)
    return count


def _write_folder(rows: Rows, folder: Path, progress: Progress) -> int:
    folder.mkdir()
    shards = range(rows.num_shards)
    count = sum(_write_file(rows, [shard], folder / f"part-{shard:05d}.parquet", progress) for shard in shards)
    _sync(folder)
    return count


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename the written file or folder; a folder cannot replace another one, so that is renamed first."""
    if temporary.is_dir() and target.exists():
        previous = temporary.with_suffix(".former")
        target.rename(previous)
        temporary.rename(target)
        _remove(previous)
    else:
        temporary.replace(target)
    _sync(target.absolute().parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()
