"""The store actor's side of tasks that hand rows over: what it answers, and to whom."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from coordinator.runtime.runtime import Runtime
from store_actors.hand_over import HandedOver, HandOverServer, socket_of, sockets_of
from store_actors.local_calls import LocalActors

ROWS = pa.table({"v": [1, 2, 3, 4]})
HOST = "10.0.0.1"


class Doubles:
    """A function whose shards emit twice the values they get, a batch each."""

    def handed_over(self, work: HandedOver, actors: LocalActors) -> Iterator[pa.RecordBatch]:
        begin = 0
        for shard, count in zip(work.shards, work.counts, strict=True):
            values = work.rows["v"].slice(begin, count).to_pylist()
            begin += count
            if shard == work.batch["fails_at"]:
                raise ValueError(f"shard {shard} refuses {count} rows")
            if values:
                yield pa.record_batch([[shard] * count, [2 * value for value in values]], names=["shard", "v"])


@pytest.fixture
def path(tmp_path: Path) -> str:
    sockets = sockets_of(str(tmp_path), "file:///fleet")
    assert sockets is not None
    return socket_of(sockets, HOST)


@pytest.fixture
def server(path: str) -> HandOverServer:
    runtime = Runtime()
    return HandOverServer(path, LocalActors("store actor", None, runtime), runtime)


def answered(path: str, shards: list[int], counts: list[int], fails_at: int = -1, cut: int | None = None) -> bytes:
    """Return the answer to a task, which sends everything or only the first bytes."""
    # As PySpark has it in a plan: pickled by value, with the type of its results.
    function = cloudpickle.dumps((Doubles(), None))
    batch = {"fails_at": fails_at}
    request = {"batch": batch, "attempt": 7, "executor": "h:1", "function_bytes": len(function), "shards": shards}
    text = json.dumps(request).encode()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ROWS.schema) as stream:
        stream.write_table(ROWS)
    message = struct.pack(">i", len(text)) + text + function + sink.getvalue().to_pybytes()
    message += struct.pack(f">{len(counts)}q", *counts)
    with socket.socket(socket.AF_UNIX) as task:
        task.connect(path)
        task.sendall(message[:cut])
        task.shutdown(socket.SHUT_WR)
        with task.makefile("rb") as answer:
            return answer.read()


def read(answer: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Return the rows of an answer, and what follows them."""
    assert answer[0] == 0
    source = pa.BufferReader(answer[1:])
    rows = pa.ipc.open_stream(source).read_all().to_pylist()
    return rows, source.read()


@pytest.mark.usefixtures("server")
def test_rows_of_each_shard_come_back(path: str) -> None:
    rows, after = read(answered(path, [3, 0, 5], [1, 0, 3]))
    assert rows == [{"shard": 3, "v": 2}, {"shard": 5, "v": 4}, {"shard": 5, "v": 6}, {"shard": 5, "v": 8}]
    assert after == b"\1"


@pytest.mark.usefixtures("server")
def test_an_answer_without_rows_says_so(path: str) -> None:
    assert answered(path, [3], [0]) == b"\1"


@pytest.mark.usefixtures("server")
def test_an_error_is_told_by_class_and_text(path: str) -> None:
    assert answered(path, [3, 5], [1, 3], fails_at=3) == b"\2ValueError: shard 3 refuses 1 rows"


@pytest.mark.usefixtures("server")
def test_an_error_after_some_rows_is_no_end_of_the_rows(path: str) -> None:
    rows, after = read(answered(path, [3, 5], [1, 3], fails_at=5))
    assert rows == [{"shard": 3, "v": 2}]
    assert after == b"\2ValueError: shard 5 refuses 3 rows"


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("cut", [0, 3, 40, -40, -1])
def test_a_task_that_ends_in_the_middle_is_answered_by_an_error(path: str, cut: int) -> None:
    assert answered(path, [3, 5], [1, 3], cut=cut).startswith(b"\2")
    # And the next one as ever.
    assert read(answered(path, [3], [4]))[1] == b"\1"


def test_the_socket_of_a_process_that_is_gone_is_replaced(path: str, server: HandOverServer) -> None:
    runtime = Runtime()
    HandOverServer(path, LocalActors("store actor", None, runtime), runtime)
    assert answered(path, [3], [0]) == b"\1"


def test_a_folder_that_others_can_enter_is_refused(path: str) -> None:
    folder = Path(path).parent
    folder.mkdir()
    folder.chmod(0o755)
    runtime = Runtime()
    with pytest.raises(PermissionError, match="other users can enter"):
        HandOverServer(path, LocalActors("store actor", None, runtime), runtime)


@pytest.mark.usefixtures("server")
def test_only_this_user_can_enter_the_folder(path: str) -> None:
    facts = Path(path).parent.stat()
    assert facts.st_uid == os.getuid()
    assert facts.st_mode & 0o777 == 0o700


def test_a_path_that_a_socket_cannot_have_is_none() -> None:
    assert sockets_of("/" + "x" * 100, "file:///fleet") is None
    longest = sockets_of("/" + "x" * 60, "file:///fleet")
    assert longest is not None
    assert len(socket_of(longest, "2001:0db8:85a3:0000:0000:8a2e:0370:7334").encode()) <= 107
