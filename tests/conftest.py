"""Storage of the tests' fleets (a folder, or a bucket of a real S3-compatible server: ``--store s3``), and their names; Kafka."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from hypothesis import settings

from tests.kafka_broker import KafkaBroker
from tests.s3_server import BUCKET, S3Server

# Helper modules assert for tests: a failure shows the values, as in a test module. Said before any of them is imported.
pytest.register_assert_rewrite("tests.unit", "tests.integration", "tests.chaos", "tests.cluster", "tests.connectors")

# A machine with other work to do is no reason for a test to fail.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# JVMs of tests live for minutes and run most of their code a few times: what optimising it once more takes, they never get back. By
# itself Java has little room for compiled code then, and compiles again and again what did not stay there.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m")

#: A URI that no other test uses.
NewUri = Callable[[], str]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--store",
        choices=("file", "s3"),
        default="file",
        help="object store of the integration and chaos tests; s3 builds a server once (some minutes) and runs it on loopback",
    )


_SHOWING_JVMS = pytest.StashKey[threading.Timer]()


def _show_jvms() -> None:
    """Have this process's JVMs print what each of their threads does."""
    for process in psutil.Process().children(recursive=True):
        if process.name() == "java":
            process.send_signal(signal.SIGQUIT)


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Have the JVMs' threads in the output of a test that is ended: what it waits for is mostly there."""
    timer = item.stash[_SHOWING_JVMS] = threading.Timer(settings.timeout - 5, _show_jvms)
    timer.daemon = True
    timer.start()


def pytest_timeout_cancel_timer(item: pytest.Item | pytest.Collector) -> None:
    # Also called for a module that cannot be collected, and for a test without a time limit.
    if (timer := item.stash.get(_SHOWING_JVMS, None)) is not None:
        timer.cancel()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The server of this run, with its credentials in the environment, as a user sets them."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    # Other settings for S3 belong to the developer, not to a test.
    kept = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for name in kept:
        del os.environ[name]
    os.environ.update(server.environment())
    yield server
    for name in server.environment():
        del os.environ[name]
    os.environ.update(kept)
    server.stop()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A Kafka broker of this run; without its jars, which come from Maven Central once, tests are skipped."""
    try:
        broker = KafkaBroker(tmp_path_factory.mktemp("kafka"))
    except OSError as error:
        pytest.skip(f"the broker's jars cannot be downloaded: {error}")
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def new_uri(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NewUri:
    """Makes URIs of fresh fleets. Ask for it before Ray starts: Ray's and Spark's workers inherit the environment."""
    if request.config.getoption("--store") == "s3":
        request.getfixturevalue("s3_server")
        return lambda: f"s3://{BUCKET}/run/{uuid.uuid4().hex}"
    return lambda: f"file://{tmp_path_factory.mktemp('fleet')}"


@pytest.fixture
def name() -> str:
    """A state name of this test's own."""
    return f"t-{uuid.uuid4().hex[:8]}"
