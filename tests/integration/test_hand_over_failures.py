"""Store actors that die, hang or are slow while tasks hand rows over to them, and tasks that end before they have an answer."""

from __future__ import annotations

import base64
import hmac
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from coordinator.service.calls import session_folder
from coordinator.service.client import CoordinatorClient
from spark_jobs.nodes.executor_nodes import ExecutorNodes
from statefleet.fleet import _DRIVER, Fleet
from store_actors.connections.hand_over import address_of, sockets_of
from tests.clocks import until
from tests.integration.counting_query import ROWS, CountingQuery
from tests.integration.streams import Feed, Run, stopping
from tests.processes import AS_NOBODY, end_process, paused

#: Seconds without an answer to a ping after which these tests' store actors count as hung; the product's are five times as many.
HUNG_AFTER_S = 4


@dataclass(frozen=True)
class Server:
    """The process that tasks of this node hand over to."""

    address: Path
    nodes: ExecutorNodes

    @property
    def pid(self) -> int:
        return int(self.address.read_text().split()[0])

    def write(self, facts: str) -> None:
        """Write what tasks read, at once."""
        unseen = self.address.with_name("unseen")
        unseen.write_text(facts)
        unseen.replace(self.address)

    def connections(self) -> int:
        """Return how many connections it has taken, or has to take."""
        path = f"{self.address}.{self.pid}"
        named = [line for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(f" {path}")]
        return len(named) - 1  # the socket that listens

    @contextmanager
    def paused(self) -> Iterator[None]:
        # One that has not answered since it was started does not hang; the last answer may be of one that a test ended since.
        for watched in self.nodes._watched.values():
            watched.ping, watched.has_answered = None, False
        until(lambda: all(watched.has_answered for watched in self.nodes._watched.values()))
        with paused(self.pid):
            yield

    @contextmanager
    def replaced(self, serve: Callable[[socket.socket], None], *, greets: bool = True) -> Iterator[threading.Event]:
        """Have tasks connect to this process, which serves each and ends its connection; yields an event for the first end."""
        kept, path, secret = self.address.read_text(), f"{self.address}.{os.getpid()}", os.urandom(32)
        served = threading.Event()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()

            def serve_each() -> None:
                with suppress(OSError):
                    while True:
                        task, _ = listening.accept()
                        with task, suppress(OSError):
                            challenge = task.recv(32, socket.MSG_WAITALL)
                            if greets:
                                task.sendall(hmac.digest(secret, challenge, "sha256"))
                            serve(task)
                        served.set()

            threading.Thread(target=serve_each, daemon=True).start()
            self.write(f"{os.getpid()} {kept.split()[1]} {base64.b64encode(secret).decode()}")
            try:
                yield served
            finally:
                self.write(kept)
                listening.shutdown(socket.SHUT_RDWR)
                os.unlink(path)


@pytest.fixture
def server(fleet: Fleet, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    sockets = sockets_of(session_folder(), fleet.uri)
    # The driver knows the fleet once it has built a query on it.
    fleet.stateful(Feed(tmp_path / "none", ROWS).stream(), name="not-started", shards=1).groupBy("k").count()
    nodes = _DRIVER._fleets[fleet.uri].nodes
    monkeypatch.setattr(nodes._actors, "hung_after_s", HUNG_AFTER_S)
    return Server(Path(address_of(sockets, ray.util.get_node_ip_address())), nodes)  # type: ignore[no-untyped-call]


@pytest.fixture
def query(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> Iterator[CountingQuery]:
    with CountingQuery(fleet, tmp_path, name, shards=4) as counting:
        counting.batch()
        yield counting


def running_tasks(spark: SparkSession) -> int:
    """Return how many tasks the executors have, also of jobs that were cancelled."""
    executors = spark.sparkContext._jsc.sc().statusStore().executorList(True)  # type: ignore[attr-defined]
    return sum(executors.apply(number).activeTasks() for number in range(executors.size()))


@pytest.mark.parametrize(
    ("ends", "batch"),
    [
        pytest.param(True, (100, "x"), id="it dies"),
        pytest.param(False, (100, "x"), id="it hangs, and is ended", marks=pytest.mark.replay),
        # The socket of a process that was ended can be connected to until its memory is freed; it takes no rows of a task then.
        pytest.param(
            False, (40_000, "x" * 1000), id="it hangs before it takes a large batch", marks=pytest.mark.replay
        ),
    ],
)
def test_a_store_actor_that_is_lost_before_it_answers_costs_no_attempt(
    query: CountingQuery, server: Server, ends: bool, batch: tuple[int, str]
) -> None:
    victim = server.pid
    with server.paused():
        query.add(*batch)
        if ends:
            until(lambda: server.connections() > 0)
            os.kill(victim, signal.SIGKILL)
        query.check()
    assert server.pid != victim
    assert query.failed_tasks() == 0


def test_a_store_actor_that_is_lost_in_the_middle_of_a_large_batch_costs_an_attempt(
    query: CountingQuery, server: Server
) -> None:
    now = server.address.read_text()

    def end_in_the_middle(task: socket.socket) -> None:
        left = 6 << 20  # more than a task keeps
        while left > 0 and (received := task.recv(1 << 20)):
            left -= len(received)
        # The next attempt finds the store actor again.
        server.write(now)

    with server.replaced(end_in_the_middle) as taken:
        query.add(40_000, "x" * 1000)
        until(taken.is_set)
    query.check()
    # Of two tasks, one for each core.
    assert 1 <= query.failed_tasks() <= 2


@pytest.mark.replay
def test_a_store_actor_that_is_slow_is_not_ended(query: CountingQuery, fleet: Fleet, server: Server) -> None:
    slow = server.pid
    # It answers pings while it waits for the coordinator.
    with paused(fleet.status()["coordinator"]["pid"]):
        query.add()
        until(lambda: server.connections() > 0)
        time.sleep(3 * HUNG_AFTER_S)
    query.check()
    assert server.pid == slow
    assert query.failed_tasks() == 0


@pytest.mark.replay
def test_a_store_actor_that_halts_again_and_again_is_not_ended(query: CountingQuery, server: Server) -> None:
    slow = server.pid
    query.add()
    for _ in range(5):
        with server.paused():
            time.sleep(HUNG_AFTER_S - 1)
        # Enough to answer a ping.
        time.sleep(2)
    query.check()
    assert server.pid == slow
    assert query.failed_tasks() == 0


def test_nothing_is_left_of_a_query_that_is_stopped_in_the_middle_of_a_batch(
    spark: SparkSession, query: CountingQuery, fleet: Fleet, server: Server
) -> None:
    with paused(fleet.status()["coordinator"]["pid"]):
        query.add()
        until(lambda: server.connections() > 0 and running_tasks(spark) > 0)
        query.run.stop()
        # The coordinator still hangs: tasks end though they have no answer.
        until(lambda: running_tasks(spark) == 0)
    until(lambda: server.connections() == 0)


@pytest.mark.replay
def test_a_job_that_is_cancelled_without_interrupts_ends_its_tasks(
    spark: SparkSession, fleet: Fleet, server: Server, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    counts = fleet.stateful(feed.stream(), name=name, shards=4).groupBy("k").count()
    errors: list[str] = []

    def act(frame: DataFrame, batch_id: int) -> None:
        if batch_id == 0:
            frame.collect()
            return
        context = frame.sparkSession.sparkContext
        threading.Timer(3, context.cancelJobGroup, [name]).start()
        context.setJobGroup(name, "without interrupts", interruptOnCancel=False)
        try:
            frame.collect()
        except Exception as error:
            errors.append(str(error))
            raise

    writer = counts.writeStream.outputMode("update").foreachBatch(act)
    with stopping(writer.option("checkpointLocation", str(tmp_path / "ck")).start()) as running:
        feed.add([(1, "x")])
        running.processAllAvailable()
        with paused(fleet.status()["coordinator"]["pid"]):
            feed.add([(1, "x")])
            with pytest.raises(StreamingQueryException):
                running.processAllAvailable()
            until(lambda: running_tasks(spark) == 0, 10)
        assert any("cancelled" in error for error in errors)
        until(lambda: server.connections() == 0)


# Each of its four attempts waits for a store actor that may be just starting.
@pytest.mark.replay
def test_a_folder_in_which_nothing_can_be_written_is_named(
    fleet: Fleet, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "full"
    folder.touch()  # also a superuser can write no file in it
    monkeypatch.setattr("statefleet.fleet.sockets_of", lambda *of: f"{folder}/sockets/")
    feed = Feed(tmp_path / "in", ROWS)
    with Run(fleet.stateful(feed.stream(), name=name, shards=2).groupBy("k").count(), "update", tmp_path / "ck") as run:
        feed.add([(1, "x")])
        with pytest.raises(
            StreamingQueryException, match=rf"nothing can be written where Spark's tasks find.*{folder}"
        ):
            run.wait()


@pytest.mark.replay
def test_a_process_that_keeps_silent_holds_no_task_up_for_ever(query: CountingQuery, server: Server) -> None:
    """As one of another user's may, whom nobody ends."""
    with server.replaced(lambda task: time.sleep(600), greets=False):
        query.add()
        until(lambda: server.connections() > 0)
    # The store actor is found again.
    query.check()
    assert query.failed_tasks() == 0


#: Puts a folder in the place of the fleet's, whose file names a process of the fleet's user, and listens; prints what comes.
STRANGER = f"""{AS_NOBODY}
folder, name, pid = sys.argv[1:]
os.umask(0)
print("begun", flush=True)
made = sys.stdin.readline().strip()
if made == "fifo":
    os.mkfifo(folder)
    print("ready", flush=True)
    sys.stdin.read()
os.mkdir(folder, int(made, 8))
with open(f"{{folder}}/{{name}}", "w") as file:
    file.write(f"{{pid}} 3 AAAA")
listening = socket.socket(socket.AF_UNIX)
listening.bind(f"{{folder}}/{{name}}.{{pid}}")
listening.listen()
print("ready", flush=True)
task, _ = listening.accept()
print(task.recv(1000), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only a superuser can be another user")
@pytest.mark.parametrize("made", ["700", "fifo"])
def test_another_user_gets_no_row_and_has_no_process_ended(query: CountingQuery, server: Server, made: str) -> None:
    """Whoever is the first to have a folder of that name in /tmp, or gets rid of the fleet's where there is no sticky bit."""
    folder = server.address.parent
    command = [sys.executable, "-c", STRANGER, str(folder), server.address.name]
    with ExitStack() as ended:
        victim = subprocess.Popen(["sleep", "600"])
        ended.callback(end_process, victim, 10)
        stranger = subprocess.Popen([*command, str(victim.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ended.callback(end_process, stranger, 10)
        assert stranger.stdin is not None
        assert stranger.stdout is not None
        # The store actor makes a folder that is gone again within a second.
        assert stranger.stdout.readline() == b"begun\n"
        kept = folder.rename(folder.with_name(f"{folder.name}-taken"))
        ended.callback(kept.rename, folder)
        ended.callback(lambda: folder.unlink() if made == "fifo" else shutil.rmtree(folder))
        stranger.stdin.write(f"{made}\n".encode())
        stranger.stdin.flush()
        assert stranger.stdout.readline() == b"ready\n"
        query.add()
        with pytest.raises(StreamingQueryException, match="is not this user's alone; nothing was sent"):
            query.run.wait()
        assert victim.poll() is None
        end_process(stranger, 10)
        assert stranger.stdout.read() == b""
    query.again()
    query.check()


def test_a_batch_whose_shards_committed_other_rows_than_were_sent_does_not_count(
    query: CountingQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = CoordinatorClient.batch_result

    def lose_a_row(client: CoordinatorClient, *asked: Any) -> Any:
        result, *others = ask(client, *asked)
        return replace(result, rows_of={**result.rows_of, 2: result.rows_of[2] - 1}), *others

    with monkeypatch.context() as lossy:
        lossy.setattr(CoordinatorClient, "batch_result", lose_a_row)
        query.add()
        with pytest.raises(StreamingQueryException, match=r"other numbers of rows.*shards=`2: \d+ sent, \d+ committed"):
            query.run.wait()
    # The batch is run again.
    query.again()
    query.check()
