"""The pytest plugin: a session with a fleet, and a tester of queries. It imports nothing of Ray or Spark before a fixture is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from statefleet.testing.query import QueryTester
    from statefleet.testing.session import LocalSession


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for seeds."""
    parser.getgroup("statefleet").addoption(
        "--statefleet-seed",
        type=int,
        action="append",
        metavar="SEED",
        help="seed of the faults of query_tester, to run a failure again; more than one is a run for each (by default 0 and 1)",
    )


@pytest.fixture(scope="session")
def statefleet_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSession]:
    """A Spark session (``.spark``) on a Ray of this process, and a fleet (``.fleet``), for all tests."""
    from statefleet.testing.session import local_session

    with local_session(tmp_path_factory.mktemp("fleet")) as session:
        yield session


@pytest.fixture
def query_tester(statefleet_session: LocalSession, tmp_path: Path, pytestconfig: pytest.Config) -> QueryTester:
    """A ``statefleet.testing.QueryTester`` on ``statefleet_session``, with the test's own folder."""
    from statefleet.testing.query import QueryTester

    seeds = pytestconfig.getoption("statefleet_seed") or (0, 1)
    return QueryTester(statefleet_session.spark, statefleet_session.fleet, tmp_path, seeds)
