"""What is refused without Spark: frames, groups and sessions of Spark Connect, and sessions that cannot be."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
import pytest

from coordinator.model.errors import InvalidRequestError, SetupError
from spark_jobs.api.streaming_frame import StreamingFrame
from spark_jobs.session.spark_connect import check_classic, check_no_remote
from spark_jobs.session.spark_session import start_session
from spark_jobs.transform.plan import _initial
from statefleet.fleet import Fleet
from statefleet.map_partitions import map_partitions_with_state_store
from statefleet.reads.rows import Rows
from statefleet.testing.query import QueryTester


def of_connect(name: str, module: str) -> Any:
    """Return an object whose class is one of Spark Connect's by its name."""
    return type(name, (), {"__module__": f"pyspark.sql.connect.{module}"})()


FRAME, GROUPS = of_connect("DataFrame", "dataframe"), of_connect("GroupedData", "group")
SESSION = of_connect("SparkSession", "session")


def bare(kind: type) -> Any:
    return object.__new__(kind)


def with_initial_state() -> None:
    _initial(GROUPS, None)  # type: ignore[arg-type]


USES: dict[str, Callable[[], Any]] = {
    "fleet.stateful": lambda: bare(Fleet).stateful(FRAME, name="n"),
    "import_checkpoint": lambda: bare(Fleet).import_checkpoint("old", FRAME, checkpoint="new"),
    "import_table": lambda: bare(Fleet).import_table(FRAME, FRAME, checkpoint="new"),
    "rows of import_table": lambda: bare(Fleet).import_table(None, FRAME, checkpoint="new"),
    "map_partitions": lambda: map_partitions_with_state_store(
        FRAME,
        lambda store, rows: rows,
        "k int",
        fleet=None,  # type: ignore[arg-type]
        name="n",
        partition_by=["k"],
    ),
    "join and union": lambda: bare(StreamingFrame)._frame_of(FRAME),
    "initialState": with_initial_state,
    "the tester of queries": lambda: QueryTester(SESSION, bare(Fleet), Path("unused")),
    "to_spark": lambda: bare(Rows).to_spark(SESSION),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_connect_is_refused_in_one_sentence(use: Callable[[], Any]) -> None:
    with pytest.raises(SetupError, match=r"does not run on Spark Connect: its operators.*statefleet\.start_session"):
        use()


@pytest.mark.parametrize("used", [FRAME, GROUPS, SESSION], ids=lambda used: type(used).__name__)
def test_pysparks_own_classes_are_in_these_modules(used: Any) -> None:
    """Read instead of imported: the import needs packages that only users of Connect have."""
    *_, module = type(used).__module__.split(".")
    source = (Path(pyspark.__file__).parent / "sql" / "connect" / f"{module}.py").read_text(encoding="utf-8")
    assert type(used).__name__ in {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def test_anything_else_passes() -> None:
    check_classic(None, 5, "k", bare(StreamingFrame), type("Mine", (), {"__module__": "pyspark.sql.connections"})())


@pytest.mark.parametrize("variable", ["SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"])
def test_a_session_is_not_made_in_a_program_of_connect(variable: str) -> None:
    check_no_remote({variable: ""})
    with pytest.raises(SetupError, match=f"does not run on Spark Connect.*{variable}"):
        check_no_remote({variable: "sc://host"})


def test_under_raydp_submit_the_command_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    with pytest.raises(SetupError, match=r"--packages.*packages=`org\.example:a:1`"):
        start_session("jobs", configs={"spark.jars.packages": "org.example:a:1"})


def test_there_cannot_be_fewer_executors_at_most_than_at_first() -> None:
    with pytest.raises(InvalidRequestError, match="fewer executors at most"):
        start_session("jobs", num_executors=3, max_executors=2)
