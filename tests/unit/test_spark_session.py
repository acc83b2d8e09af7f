"""What a session refuses before Spark starts."""

from __future__ import annotations

import pytest

from coordinator.model.errors import InvalidRequestError, SetupError
from spark_jobs.session.spark_session import start_session


def test_under_raydp_submit_the_command_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    with pytest.raises(SetupError, match=r"--packages.*packages=`org\.example:a:1`"):
        start_session("jobs", configs={"spark.jars.packages": "org.example:a:1"})


def test_there_cannot_be_fewer_executors_at_most_than_at_first() -> None:
    with pytest.raises(InvalidRequestError, match="fewer executors at most"):
        start_session("jobs", num_executors=3, max_executors=2)
