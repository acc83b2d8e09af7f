"""The store actor's side of tasks that hand rows over: what it answers, and to whom."""

from __future__ import annotations

import json
import os
import socket
import struct
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import cloudpickle

from coordinator.runtime.runtime import Runtime
from store_actors import hand_over, unsafe_rows
from store_actors.hand_over import HandedOver, HandOverServer, address_of, hand_over_server, sockets_of
from store_actors.local_calls import LocalActors

ROWS = pa.table({"v": [1, 2, 3, 4]})
HOST = "10.0.0.1"
#: Whether rows are in Spark's own format, or are an Arrow stream.
FORMATS = pytest.mark.parametrize("unsafe", [False, True], ids=["arrow", "unsafe rows"])


class Doubles:
    """A function whose shards emit twice the values they get, a batch each."""

    def handed_over(self, work: HandedOver, actors: LocalActors) -> Iterator[pa.RecordBatch]:
        for shard, rows in zip(work.shards, work.rows, strict=True):
            if shard == work.batch["fails_at"]:
                raise ValueError(f"shard {shard} refuses {len(rows)} rows")
            if len(rows):
                yield pa.record_batch(
                    [[shard] * len(rows), pc.multiply(rows["v"], 2).combine_chunks()], names=["shard", "v"]
                )


@pytest.fixture
def path() -> Iterator[str]:
    # Paths of sockets are short, and those of tests' folders are not.
    with tempfile.TemporaryDirectory() as folder:
        sockets = sockets_of(folder, "file:///fleet")
        assert sockets is not None
        yield address_of(sockets, HOST)


@pytest.fixture
def server(path: str) -> HandOverServer:
    runtime = Runtime()
    return HandOverServer(path, LocalActors("store actor", None, runtime), runtime)


def request_of(shards: list[int], counts: list[int], fails_at: int = -1, unsafe: bool = False) -> bytes:
    return b"".join(parts_of(shards, counts, fails_at, unsafe))


def parts_of(shards: list[int], counts: list[int], fails_at: int = -1, unsafe: bool = False) -> list[bytes]:
    """Return what a task sends before its rows, and the rows of each shard."""
    ends = np.cumsum(counts)
    of_shards = [ROWS.slice(end - count, count) for end, count in zip(ends, counts, strict=True)]
    rows_of = blocks_of if unsafe else whole_stream_of
    return [head_of(shards, fails_at, unsafe), *map(rows_of, of_shards)]


def head_of(shards: list[int], fails_at: int = -1, unsafe: bool = False, columns: pa.Schema = ROWS.schema) -> bytes:
    """Return what a task sends before its rows."""
    # As PySpark has it in a plan: pickled by value, with the type of its results.
    function = cloudpickle.dumps((Doubles(), None))
    batch = {"fails_at": fails_at}
    request = {
        "batch": batch, "attempt": 7, "executor": "h:1", "function_bytes": len(function), "unsafe_rows": unsafe,
        "unsafe_results": unsafe, "shards": shards,
    }  # fmt: skip
    text = json.dumps(request).encode()
    return struct.pack(">i", len(text)) + text + function + (stream_of(columns.empty_table()) if unsafe else b"")


def stream_of(rows: pa.Table) -> bytes:
    sink = BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return sink.getvalue()


def whole_stream_of(rows: pa.Table) -> bytes:
    """Return an Arrow stream, and what shows that it was not cut."""
    return stream_of(rows) + b"\1"


def blocks_of(rows: pa.Table) -> bytes:
    sink = BytesIO()
    for batch in with_routes(rows).to_batches():
        unsafe_rows.write_blocks(batch, sink)
    unsafe_rows.write_end(sink)
    return sink.getvalue()


def with_routes(rows: pa.Table) -> pa.Table:
    return rows.append_column("route", pa.array([9] * len(rows)))


def connected(path: str) -> socket.socket:
    """Return a connection that the server has taken."""
    task = socket.socket(socket.AF_UNIX)
    task.settimeout(10)
    task.connect(f"{path}.{os.getpid()}")
    assert task.recv(1) == b"\4"
    task.settimeout(None)
    return task


def answer_to(path: str, message: bytes) -> bytes:
    """Return the answer to a task that sends nothing else."""
    with connected(path) as task, task.makefile("rb") as answer:
        # The server may have read enough.
        with suppress(BrokenPipeError):
            task.sendall(message)
        with suppress(OSError):
            task.shutdown(socket.SHUT_WR)
        return answer.read()


def answered(
    path: str, shards: list[int], counts: list[int], fails_at: int = -1, cut: int | None = None, unsafe: bool = False
) -> bytes:
    """Return the answer to a task, which sends everything or only the first bytes."""
    return answer_to(path, request_of(shards, counts, fails_at, unsafe)[:cut])


def read(answer: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Return the rows of an answer, and what follows them."""
    if answer[0] == 3:
        blocks, schema = BytesIO(answer[1:]), pa.schema([("shard", pa.int64()), ("v", pa.int64())])
        return pa.Table.from_batches(unsafe_rows.read_blocks(blocks, schema, 0)).to_pylist(), blocks.read()
    assert answer[0] == 0
    source = pa.BufferReader(answer[1:])
    rows = pa.ipc.open_stream(source).read_all().to_pylist()
    return rows, source.read()


@pytest.mark.usefixtures("server")
@FORMATS
def test_rows_of_each_shard_come_back(path: str, unsafe: bool) -> None:
    rows, after = read(answered(path, [3, 0, 5], [1, 0, 3], unsafe=unsafe))
    assert rows == [{"shard": 3, "v": 2}, {"shard": 5, "v": 4}, {"shard": 5, "v": 6}, {"shard": 5, "v": 8}]
    assert after == b"\1"


@pytest.mark.usefixtures("server")
@FORMATS
def test_an_answer_without_rows_says_so(path: str, unsafe: bool) -> None:
    assert answered(path, [3], [0], unsafe=unsafe) == b"\1"


@pytest.mark.usefixtures("server")
@FORMATS
def test_an_error_is_told_by_class_and_text(path: str, unsafe: bool) -> None:
    assert answered(path, [3, 5], [1, 3], fails_at=3, unsafe=unsafe) == b"\2ValueError: shard 3 refuses 1 rows"


@pytest.mark.usefixtures("server")
@FORMATS
def test_an_error_after_some_rows_is_no_end_of_the_rows(path: str, unsafe: bool) -> None:
    rows, after = read(answered(path, [3, 5], [1, 3], fails_at=5, unsafe=unsafe))
    assert rows == [{"shard": 3, "v": 2}]
    assert after == b"\2ValueError: shard 5 refuses 3 rows"


@pytest.mark.usefixtures("server")
@FORMATS
def test_what_a_shard_emits_comes_before_the_rows_of_the_next_one_are_sent(path: str, unsafe: bool) -> None:
    head, first, second = parts_of([3, 5], [1, 3], unsafe=unsafe)
    with connected(path) as task, task.makefile("rb") as source:
        task.settimeout(10)
        task.sendall(head + first)
        answer = source.read(1)
        if unsafe:
            answer += source.read(4 + 24)
        else:
            stream = pa.ipc.open_stream(source)
            assert stream.read_next_batch().to_pylist() == [{"shard": 3, "v": 2}]
        task.sendall(second)
        if unsafe:
            assert read(answer + source.read())[0] == [{"shard": 3, "v": 2}, *({"shard": 5, "v": v} for v in (4, 6, 8))]
        else:
            assert stream.read_next_batch()["v"].to_pylist() == [4, 6, 8]


@pytest.mark.usefixtures("server")
@FORMATS
@pytest.mark.parametrize("cut", [0, 3, 40, -40, -1])
def test_a_task_that_ends_in_the_middle_is_answered_by_an_error(path: str, cut: int, unsafe: bool) -> None:
    answer = answered(path, [3, 5], [1, 3], cut=cut, unsafe=unsafe)
    if answer[0] != 2:
        rows, answer = read(answer)
        assert rows == [{"shard": 3, "v": 2}]
    assert answer.startswith(b"\2")
    # And the next one as ever.
    assert read(answered(path, [3], [4]))[1] == b"\1"


@pytest.mark.usefixtures("server")
@FORMATS
def test_rows_that_end_between_two_batches_reach_no_shard(path: str, unsafe: bool) -> None:
    # As a task ends that is killed, or that cannot fetch its next rows.
    sent = BytesIO(head_of([3], unsafe=unsafe))
    sent.seek(0, os.SEEK_END)
    if unsafe:
        unsafe_rows.write_blocks(with_routes(ROWS).to_batches()[0], sent)
    else:
        # Not closed.
        pa.ipc.new_stream(sent, ROWS.schema).write_table(ROWS)
    assert answer_to(path, sent.getvalue()).startswith(b"\2EOFError: the task ended in the middle of its r")


@pytest.mark.usefixtures("server")
def test_rows_without_columns_are_refused(path: str) -> None:
    message = head_of([3], unsafe=True, columns=pa.schema([])) + blocks_of(ROWS)
    assert b"they have no columns" in answer_to(path, message)


LENGTH = struct.Struct(">i")
STRANGERS = {
    "no request": b"GET / HTTP/1.1\r\n\r\n" * 1000,
    "a huge length": LENGTH.pack(2**31 - 1) + b"x" * 1000,
    "a length below zero": LENGTH.pack(-1) + b"x" * 1000,
    "no JSON": LENGTH.pack(100) + b"x" * 100,
    "other JSON": LENGTH.pack(2) + b"[]",
    "a huge function": LENGTH.pack(len(text := b'{"function_bytes": 1000000000000}')) + text,
    "a function below zero": LENGTH.pack(len(text := b'{"function_bytes": -1}')) + text,
    "a huge block": request_of([3], [4], unsafe=True)[: -(4 + 4 * 24 + 4)] + LENGTH.pack(2**31 - 1) + b"x" * 1000,
    "huge rows": request_of([3], [4]).partition(b"\xff\xff\xff\xff")[0]
    + b"\xff\xff\xff\xff\xff\xff\xff\x7f"
    + b"x" * 1000,
}


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("sent", STRANGERS.values(), ids=STRANGERS)
def test_a_strangers_bytes_are_refused(path: str, sent: bytes) -> None:
    tracemalloc.start()
    try:
        assert answer_to(path, sent).startswith(b"\2")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert read(answered(path, [3], [4]))[1] == b"\1"


def test_what_a_length_says_is_not_reserved_before_it_arrives() -> None:
    assert hand_over._Pieces(BytesIO(b"abc")).read(1 << 62) == b"abc"
    pieces = bytes(range(256)) * (1 << 18)  # more than one
    assert hand_over._Pieces(BytesIO(pieces + b"next")).read(len(pieces)) == pieces


@pytest.mark.usefixtures("server")
def test_strangers_that_are_silent_are_cut_and_hold_nobody_up(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "_REQUEST_S", 0.2)
    monkeypatch.setattr(hand_over, "_ROWS_S", 0.2)
    message = request_of([3], [4])
    silent = []
    for sent in (0, 2, 30, len(message) - 200):
        silent.append(connected(path))
        silent[-1].sendall(message[:sent])
    assert read(answered(path, [3], [4]))[1] == b"\1"
    for stranger in silent:
        with stranger, stranger.makefile("rb") as answer:
            assert answer.read() == b"\2TimeoutError: timed out"


@pytest.mark.usefixtures("server")
def test_a_ping_is_answered_while_tasks_wait(path: str) -> None:
    with connected(path) as waiting:
        waiting.sendall(request_of([3], [4])[:-8])
        for _ in range(3):
            with connected(path) as ping:
                ping.sendall(LENGTH.pack(0))
                ping.settimeout(10)
                assert ping.recv(2) == b"\1"


@pytest.mark.usefixtures("server")
def test_tasks_are_told_which_process_answers_them(path: str) -> None:
    pid, start, hung_after_s, _ = Path(path).read_text().split()
    assert int(pid) == os.getpid()
    assert start == Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    assert hung_after_s == "20"
    assert {file.name for file in Path(path).parent.iterdir()} == {Path(path).name, f"{Path(path).name}.{pid}"}


def test_what_earlier_processes_left_is_replaced(path: str, server: HandOverServer) -> None:
    # One of them had the id of this process.
    others = Path(f"{path}.1"), Path(f"{path[:-1]}x.1")
    for file in others:
        file.touch()
    Path(path).write_text("1 1 20")
    runtime = Runtime()
    HandOverServer(path, LocalActors("store actor", None, runtime), runtime)
    assert answered(path, [3], [0]) == b"\1"
    assert Path(path).read_text().split()[0] == str(os.getpid())
    # Another fleet's are not touched.
    assert [file.exists() for file in others] == [False, True]


def test_a_server_that_cannot_start_is_tried_again(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hand_over, "_AGAIN_S", 0.01)
    folder = Path(path).parent
    folder.touch()  # no folder can be made there
    runtime = Runtime()
    hand_over_server(path, LocalActors("store actor", None, runtime), runtime)
    time.sleep(0.1)
    folder.unlink()
    while not Path(path).exists():
        time.sleep(0.01)
    assert answered(path, [3], [0]) == b"\1"
    assert len([record for record in caplog.records if "cannot hand rows over" in record.message]) == 1


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
    # The greatest id of a process of Linux is below 2**22.
    assert len(f"{address_of(longest, '2001:0db8:85a3:0000:0000:8a2e:0370:7334')}.{2**22}".encode()) <= 107
