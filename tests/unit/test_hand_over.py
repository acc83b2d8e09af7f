"""The store actor's side of tasks that hand rows over: what it answers, and to whom."""

from __future__ import annotations

import base64
import hmac
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.runtime.runtime import Runtime
from store_actors.client.operator_task import HandedOver
from store_actors.connections import hand_over
from store_actors.connections.hand_over import HandOverServer, Serve, address_of, hand_over_server, sockets_of
from store_actors.engine import unsafe_rows
from tests.clocks import until
from tests.processes import AS_NOBODY, NOBODY
from tests.unit.no_epochs import no_epochs

ROWS = pa.table({"v": [1, 2, 3, 4]})
HOST = "10.0.0.1"
#: The answer if no shard emits a row.
NOTHING = b"\1" + bytes(16)
#: Whether rows are in Spark's own format, or are an Arrow stream.
FORMATS = pytest.mark.parametrize("unsafe", [False, True], ids=["arrow", "unsafe rows"])


def doubles(work: HandedOver) -> Iterator[pa.RecordBatch]:
    """Have each shard emit twice the values it gets, a batch each."""
    for shard, rows in zip(work.shards, work.rows, strict=True):
        if shard == work.batch["fails_at"]:
            raise ValueError(f"shard {shard} refuses {len(rows)} rows")
        if len(rows):
            yield pa.record_batch(
                [[shard] * len(rows), pc.multiply(rows["v"], 2).combine_chunks()], names=["shard", "v"]
            )


def echoes(work: HandedOver) -> Iterator[pa.RecordBatch]:
    """Have shards emit the rows that they get."""
    for rows in work.rows:
        yield from rows.to_batches()


def takes_one(work: HandedOver) -> Iterator[pa.RecordBatch]:
    """Read the rows of the first shard only."""
    next(work.rows)
    yield from ()


def serve(work: HandedOver) -> Iterator[pa.RecordBatch]:
    """Do what the work's operator says."""
    operators: dict[bytes, Serve] = {b"doubles": doubles, b"echoes": echoes, b"takes one": takes_one}
    return operators[work.operator](work)


@pytest.fixture
def path() -> Iterator[str]:
    # Paths of sockets are short, and those of tests' folders are not.
    with tempfile.TemporaryDirectory() as folder:
        yield address_of(f"{folder}/statefleet-0-session/fleet-", HOST)


@pytest.fixture
def server(path: str) -> HandOverServer:
    return HandOverServer(path, serve, no_epochs, Runtime())


def request_of(shards: list[int], counts: list[int], fails_at: int = -1, unsafe: bool = False) -> bytes:
    return b"".join(parts_of(shards, counts, fails_at, unsafe))


def parts_of(shards: list[int], counts: list[int], fails_at: int = -1, unsafe: bool = False) -> list[bytes]:
    """Return what a task sends before its rows, and the rows of each shard."""
    ends = np.cumsum(counts)
    of_shards = [ROWS.slice(end - count, count) for end, count in zip(ends, counts, strict=True)]
    return [
        head_of(shards, fails_at, unsafe),
        *(whole_shard(shard, rows, unsafe) for shard, rows in zip(shards, of_shards, strict=True)),
    ]


def head_of(
    shards: list[int],
    fails_at: int = -1,
    unsafe: bool = False,
    columns: pa.Schema = ROWS.schema,
    operator: bytes = b"doubles",
    unsafe_results: bool | None = None,
) -> bytes:
    """Return what a task sends before its rows."""
    request = {
        "batch": {"fails_at": fails_at}, "attempt": 7, "executor": "h:1", "operator_bytes": len(operator), "unsafe_rows": unsafe,
        "unsafe_results": unsafe if unsafe_results is None else unsafe_results, "shards": shards,
    }  # fmt: skip
    text = json.dumps(request).encode()
    return struct.pack(">i", len(text)) + text + operator + (stream_of(columns.empty_table()) if unsafe else b"")


def stream_of(rows: pa.Table) -> bytes:
    sink = BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return sink.getvalue()


def whole_shard(shard: int, rows: pa.Table, unsafe: bool) -> bytes:
    """Return the rows of a shard, and their end."""
    content = blocks_of(rows) if unsafe else stream_of(rows)
    return content + struct.pack(">iqq", shard, len(rows), len(content))


def blocks_of(rows: pa.Table) -> bytes:
    sink = BytesIO()
    for batch in with_routes(rows).to_batches():
        unsafe_rows.write_blocks(batch, sink)
    unsafe_rows.write_end(sink)
    return sink.getvalue()


def with_routes(rows: pa.Table) -> pa.Table:
    return rows.append_column("route", pa.array([9] * len(rows)))


def connected(path: str) -> socket.socket:
    """Return a connection whose server has proved who it is."""
    task = socket.socket(socket.AF_UNIX)
    task.settimeout(10)
    pid, _, secret = Path(path).read_text().split()
    task.connect(f"{path}.{pid}")
    task.sendall(challenge := os.urandom(32))
    assert task.recv(32) == hmac.digest(base64.b64decode(secret), challenge, "sha256")
    task.settimeout(None)
    return task


def answer_to(path: str, message: bytes) -> bytes:
    """Return the answer to a task that sends nothing else."""

    def send() -> None:
        # The server may have read enough.
        with suppress(OSError):
            task.sendall(message)
            task.shutdown(socket.SHUT_WR)

    with connected(path) as task, task.makefile("rb") as answer:
        sending = threading.Thread(target=send)
        sending.start()
        try:
            return answer.read()
        finally:
            sending.join()


def answered(
    path: str, shards: list[int], counts: list[int], fails_at: int = -1, cut: int | None = None, unsafe: bool = False
) -> bytes:
    """Return the answer to a task, which sends everything or only the first bytes."""
    return answer_to(path, request_of(shards, counts, fails_at, unsafe)[:cut])


def read(answer: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Return the rows of an answer of :func:`doubles`, and what follows them."""
    rows, after = table_of(answer, pa.schema([("shard", pa.int64()), ("v", pa.int64())]))
    return rows.to_pylist(), after


def table_of(answer: bytes, schema: pa.Schema) -> tuple[pa.Table, bytes]:
    """Return the rows of an answer, and what follows them; at its end have to be the numbers of its rows and bytes."""
    source = pa.BufferReader(answer[1:])
    if answer[0] == 3:
        rows = pa.Table.from_batches(unsafe_rows.read_blocks(source, schema, 0), schema)
    else:
        assert answer[0] == 0, answer[:200]
        rows = pa.ipc.open_stream(source).read_all()
    size, after = source.tell(), source.read()
    if after[:1] == b"\1":
        assert struct.unpack(">qq", after[1:]) == (len(rows), size)
        after = after[:1]
    return rows, after


def error_of(answer: bytes) -> str:
    """Return the text of the error that an answer has, and nothing else."""
    assert answer[0] == 2, answer[:200]
    assert struct.unpack(">i", answer[1:5]) == (len(answer) - 5,)
    return answer[5:].decode()


@pytest.mark.usefixtures("server")
@FORMATS
def test_an_error_is_told_by_class_and_text_and_after_some_rows_is_no_end_of_them(path: str, unsafe: bool) -> None:
    answer = answered(path, [3, 5], [1, 3], fails_at=3, unsafe=unsafe)
    assert error_of(answer) == "ValueError: shard 3 refuses 1 rows"
    rows, after = read(answered(path, [3, 5], [1, 3], fails_at=5, unsafe=unsafe))
    assert rows == [{"shard": 3, "v": 2}]
    assert error_of(after) == "ValueError: shard 5 refuses 3 rows"


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
        task.shutdown(socket.SHUT_WR)
        if unsafe:
            assert read(answer + source.read())[0] == [{"shard": 3, "v": 2}, *({"shard": 5, "v": v} for v in (4, 6, 8))]
        else:
            assert stream.read_next_batch()["v"].to_pylist() == [4, 6, 8]


#: Between two batches of the last shard, as a task ends that is killed, or that cannot fetch its next rows: before what says that there
#: are no more of them (8 bytes of Arrow's stream, or the size of a block), and the shard's end (20 bytes).
BETWEEN = "between two batches"


@pytest.mark.usefixtures("server")
@FORMATS
@pytest.mark.parametrize("cut", [0, 3, 40, -40, BETWEEN, -1])
def test_a_task_that_ends_in_the_middle_is_answered_by_an_error(path: str, cut: int | str, unsafe: bool) -> None:
    bytes_sent = cut if isinstance(cut, int) else -24 if unsafe else -28
    answer = answered(path, [3, 5], [1, 3], cut=bytes_sent, unsafe=unsafe)
    if answer[0] != 2:
        rows, answer = read(answer)
        assert rows == [{"shard": 3, "v": 2}]
    assert error_of(answer).startswith("EOFError: the task ended in the middle of its r" if cut is BETWEEN else "")
    # And the next one as ever.
    assert read(answered(path, [3], [4]))[1] == b"\1"


def end_of(shard: int, rows: int, size: int) -> bytes:
    return struct.pack(">iqq", shard, rows, size)


#: What a task of the shards 3 and 5 sends in place of the end of one of them, by the end as it should be, and what the error says.
OTHER_ENDS = {
    "a row too few": (lambda shard, rows, size: end_of(shard, rows + 1, size), "that were sent are"),
    "a row too many": (lambda shard, rows, size: end_of(shard, rows - 1, size), "that were sent are"),
    "a byte too few": (lambda shard, rows, size: end_of(shard, rows, size + 1), "that were sent are"),
    "a byte too many": (lambda shard, rows, size: end_of(shard, rows, size - 1), "that were sent are"),
    "another shard": (lambda shard, rows, size: end_of(shard + 1, rows, size), "that were sent are"),
    "no end": (lambda shard, rows, size: b"", "e"),
    "something after it": (lambda shard, rows, size: end_of(shard, rows, size) + b"\0", ""),
    "the end twice": (lambda shard, rows, size: 2 * end_of(shard, rows, size), ""),
}


@pytest.mark.usefixtures("server")
@FORMATS
@pytest.mark.parametrize("number", [0, 1], ids=["first shard", "last shard"])
@pytest.mark.parametrize(("other", "said"), OTHER_ENDS.values(), ids=OTHER_ENDS)
def test_a_shard_whose_rows_are_not_those_that_were_sent_gets_none(
    path: str, other: Callable[[int, int, int], bytes], said: str, number: int, unsafe: bool
) -> None:
    head, *shards = parts_of([3, 5], [1, 3], unsafe=unsafe)
    content = shards[number][:-20]
    shards[number] = content + other((3, 5)[number], (1, 3)[number], len(content))
    answer = answer_to(path, head + b"".join(shards))
    if number or answer[0] != 2:
        # Something after the first shard's end would be the begin of the second one's rows.
        rows, answer = read(answer)
        assert rows == [{"shard": 3, "v": 2}]
    assert said in error_of(answer)


#: Texts for rows around the size of a block that a store actor writes, and many times it.
SIZES = [0, 1, *(unsafe_rows.MOST_BLOCK_BYTES - 24 + more for more in (-1, 0, 1)), 3 * unsafe_rows.MOST_BLOCK_BYTES + 5]


@pytest.mark.usefixtures("server")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.permutations(SIZES).flatmap(lambda all_: st.integers(0, 6).map(lambda n: all_[:n])), min_size=1, max_size=3
    ),
    st.booleans(),
    st.booleans(),
)
def test_rows_of_any_size_come_back_in_any_order(
    path: str, shards: list[list[int]], unsafe: bool, unsafe_results: bool
) -> None:
    schema = pa.schema([("k", pa.int64()), ("s", pa.string())])
    tables = [
        pa.table([list(range(len(sizes))), [chr(97 + size % 26) * size for size in sizes]], schema=schema)
        for sizes in shards
    ]
    head = head_of(
        list(range(len(tables))), unsafe=unsafe, columns=schema, operator=b"echoes", unsafe_results=unsafe_results
    )
    answer = answer_to(path, head + b"".join(whole_shard(shard, rows, unsafe) for shard, rows in enumerate(tables)))
    expected = pa.concat_tables(tables)
    if len(expected):
        assert table_of(answer, schema) == (expected, b"\1")
    else:
        assert answer == NOTHING


@pytest.mark.usefixtures("server")
def test_rows_that_an_operator_leaves_unread_and_rows_without_columns_are_an_error(path: str) -> None:
    unread = head_of([3, 5], operator=b"takes one") + b"".join(parts_of([3, 5], [1, 3])[1:])
    assert b"left rows of the task's shards unread" in answer_to(path, unread)
    bare = head_of([3], unsafe=True, columns=pa.schema([])) + blocks_of(ROWS)
    assert b"they have no columns" in answer_to(path, bare)


LENGTH = struct.Struct(">i")
STRANGERS = {
    "no request": b"GET / HTTP/1.1\r\n\r\n" * 1000,
    "a huge length": LENGTH.pack(2**31 - 1) + b"x" * 1000,
    "a length below zero": LENGTH.pack(-1) + b"x" * 1000,
    "no JSON": LENGTH.pack(100) + b"x" * 100,
    "other JSON": LENGTH.pack(2) + b"[]",
    "a huge operator": LENGTH.pack(len(text := b'{"operator_bytes": 1000000000000}')) + text,
    "an operator below zero": LENGTH.pack(len(text := b'{"operator_bytes": -1}')) + text,
    "a huge block": request_of([3], [4], unsafe=True)[: -(4 + 4 * 24 + 4 + 20)] + LENGTH.pack(2**31 - 1) + b"x" * 1000,
    "huge rows": request_of([3], [4]).partition(b"\xff\xff\xff\xff")[0]
    + b"\xff\xff\xff\xff\xff\xff\xff\x7f"
    + b"x" * 1000,
}


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("sent", STRANGERS.values(), ids=STRANGERS)
def test_a_strangers_bytes_are_refused(path: str, sent: bytes) -> None:
    tracemalloc.start()
    try:
        assert error_of(answer_to(path, sent))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert read(answered(path, [3], [4]))[1] == b"\1"


def test_what_a_length_says_is_not_reserved_before_it_arrives() -> None:
    assert hand_over._Pieces(BytesIO(b"abc")).read(1 << 62) == b"abc"
    pieces = bytes(range(256)) * (1 << 18)  # more than one
    assert hand_over._Pieces(BytesIO(pieces + b"next")).read(len(pieces)) == pieces


def test_strangers_that_are_silent_are_cut_and_hold_nobody_up(path: str) -> None:
    HandOverServer(path, serve, no_epochs, Runtime(), request_s=0.2, rows_s=0.2)
    message = request_of([3], [4])
    silent = []
    for sent in (0, 2, 30, len(message) - 200):
        silent.append(connected(path))
        silent[-1].sendall(message[:sent])
    assert read(answered(path, [3], [4]))[1] == b"\1"
    for stranger in silent:
        with stranger, stranger.makefile("rb") as answer:
            assert error_of(answer.read()) == "TimeoutError: timed out"


def test_what_earlier_processes_left_is_replaced(path: str, server: HandOverServer) -> None:
    # One of them had the id of this process.
    others = Path(f"{path}.1"), Path(f"{path[:-1]}x.1")
    for file in others:
        file.touch()
    Path(path).write_text("1 1 x")
    HandOverServer(path, serve, no_epochs, Runtime())
    assert answered(path, [3], [0]) == NOTHING
    assert Path(path).read_text().split()[0] == str(os.getpid())
    # Another fleet's are not touched.
    assert [file.exists() for file in others] == [False, True]


def test_a_server_that_cannot_start_is_tried_again(path: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(path).parent
    folder.touch()  # no folder can be made there
    hand_over_server(path, serve, no_epochs, Runtime(), again_s=0.01)
    time.sleep(0.1)
    folder.unlink()
    while not Path(path).exists():
        time.sleep(0.01)
    assert answered(path, [3], [0]) == NOTHING
    assert len([record for record in caplog.records if "cannot hand rows over" in record.message]) == 1


def another_mode(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


def a_link(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)


def another_owner(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)


def a_file(folder: Path) -> None:
    folder.touch(mode=0o600)


#: What only a superuser can try: being another user.
AS_ANOTHER_USER = pytest.mark.skipif(os.geteuid() != 0, reason="only a superuser can be another user")
OTHERS = [another_mode, a_link, pytest.param(another_owner, marks=AS_ANOTHER_USER), a_file]


@pytest.mark.parametrize("made", OTHERS)
def test_a_folder_that_is_not_this_users_alone_is_refused(path: str, made: Callable[[Path], None]) -> None:
    made(Path(path).parent)
    with pytest.raises(OSError, match=r"is not this user's alone|File exists"):
        HandOverServer(path, serve, no_epochs, Runtime())
    assert not list(Path(path).parent.parent.glob("*/*"))


@AS_ANOTHER_USER
def test_a_process_of_another_user_is_told_nothing(
    path: str, server: HandOverServer, caplog: pytest.LogCaptureFixture
) -> None:
    # As if all folders and the socket let him in.
    for folder in Path(path).parent, Path(path).parent.parent:
        folder.chmod(0o755)
    own_socket(Path(path)).chmod(0o777)
    program = (
        f"{AS_NOBODY}stranger = socket.socket(socket.AF_UNIX); stranger.connect(sys.argv[1]); "
        "stranger.send(bytes(100)); print(stranger.recv(1000))"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(own_socket(Path(path)))], capture_output=True, check=False)
    refusals = b"ConnectionResetError", b"BrokenPipeError"
    assert ran.stdout.strip() == b"b''" or any(refusal in ran.stderr for refusal in refusals)
    assert f"a process of another user was refused [uid=`{NOBODY}`" in caplog.text
    assert answered(path, [3], [0]) == NOTHING


def own_socket(path: Path) -> Path:
    return Path(f"{path}.{os.getpid()}")


def with_a_socket_that_nobody_listens_on(path: Path) -> None:
    own_socket(path).unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(own_socket(path)))


MISSING = {
    "file": lambda path: path.unlink(),
    "socket": lambda path: own_socket(path).unlink(),
    "folder": lambda path: shutil.rmtree(path.parent),
    "listening": with_a_socket_that_nobody_listens_on,
}


@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING)
def test_what_was_deleted_is_made_again(path: str, server: HandOverServer, missing: Callable[[Path], None]) -> None:
    # As what clears folders of temporary files by age does.
    threads = sum(thread.name == "statefleet-hand-over" for thread in threading.enumerate())
    with connected(path) as before:
        missing(Path(path))
        server.publish_again()
        # The thread of the socket that is gone ends.
        until(lambda: sum(thread.name == "statefleet-hand-over" for thread in threading.enumerate()) == threads)
        assert answered(path, [3], [0]) == NOTHING
        # A task that was connected goes on.
        before.sendall(request_of([3], [0]))
        before.shutdown(socket.SHUT_WR)
        assert before.makefile("rb").read() == NOTHING


@pytest.mark.parametrize(
    "made",
    [os.mkfifo, lambda path: Path(path).symlink_to("/dev/zero"), lambda path: Path(path).write_bytes(b"\xff" * 50)],
)
def test_what_others_put_in_the_place_of_the_file_is_left(
    path: str, server: HandOverServer, made: Callable[[str], None]
) -> None:
    Path(path).unlink()
    made(path)
    with suppress(OSError):
        server.publish_again()
    Path(path).unlink()
    server.publish_again()
    assert answered(path, [3], [0]) == NOTHING


def test_what_processes_left_that_have_ended_is_removed(path: str) -> None:
    folder = Path(path).parent
    folder.mkdir(mode=0o700)
    with subprocess.Popen(["true"]) as ended:
        pass
    kept = [folder / "other", folder / f"other.{os.getppid()}", folder / "stray.x"]
    for file in kept[1:]:
        file.mkdir()
    kept[0].write_text(f"{os.getppid()} 3 x")
    left = [folder / "gone", folder / f"gone.{ended.pid}", folder / f"other.{ended.pid}"]
    left[0].write_text(f"{ended.pid} 3 x")
    for file in left[1:]:
        file.touch()
    (folder / f"{Path(path).name}.stray").mkdir()
    # Of other sessions: one that has ended, one that others can enter, and one that runs.
    others = [folder.with_name(f"statefleet-0-{name}") for name in ("ended", "foreign", "runs")]
    for other, mode, pid in zip(others, (0o700, 0o755, 0o700), (ended.pid, ended.pid, os.getpid()), strict=True):
        other.mkdir()
        other.chmod(mode)
        (other / f"x.{pid}").touch()
    HandOverServer(path, serve, no_epochs, Runtime())
    assert answered(path, [3], [0]) == NOTHING
    assert [file.exists() for file in kept] == [True] * 3
    assert [file.exists() for file in left] == [False] * 3
    assert [other.exists() for other in others] == [False, True, True]


def test_nothing_is_made_again_that_is_there_or_is_a_later_processs(path: str, server: HandOverServer) -> None:
    first = Path(path).stat()
    server.publish_again()
    assert Path(path).stat() == first
    later = HandOverServer(path, serve, no_epochs, Runtime())
    facts = Path(path).read_text()
    server.publish_again()
    assert Path(path).read_text() == facts
    later.publish_again()
    assert answered(path, [3], [0]) == NOTHING


@pytest.mark.usefixtures("server")
def test_only_this_user_can_enter_the_folder(path: str) -> None:
    facts = Path(path).parent.stat()
    assert (facts.st_uid, facts.st_mode & 0o777) == (os.getuid(), 0o700)


def test_a_socket_can_have_the_path_of_each_store_actor() -> None:
    sockets = sockets_of("/" + "x" * 100, "file:///fleet")
    assert sockets.startswith(f"/tmp/statefleet-{os.getuid()}-")
    assert sockets_of("/session", "file:///fleet", uid=4321).startswith("/tmp/statefleet-4321-")
    # The greatest id of a process of Linux is below 2**22.
    assert len(f"{address_of(sockets, '2001:0db8:85a3:0000:0000:8a2e:0370:7334', 99)}.{2**22}".encode()) <= 107
    # Sessions of Ray on one machine may have the same fleet, and the same address.
    assert sockets != sockets_of("/other", "file:///fleet") != sockets_of("/other", "file:///other")
