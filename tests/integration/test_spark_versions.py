"""States that Spark 3.5 and Spark 4.2 made (tests/data) go on with the version that runs here, beside its own results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from statefleet.fleet import Fleet, connect
from tests.integration.case_systems import Inputs, System, on_spark
from tests.integration.streams import short_list
from tests.integration.version_states import VERSION_CASES, VersionCase, unpack

DATA = Path(__file__).parents[1] / "data"
VERSIONS = ("spark-3.5", "spark-4.2")
HERE = f"spark-{pyspark.__version__.rpartition('.')[0]}"
#: Going on with the same version is what other tests are about.
MADE_BY = [pytest.param(version, marks=[pytest.mark.replay] if version == HERE else []) for version in VERSIONS]
FEW = ("windows", "function")
IMPORTED = [name for name, case in VERSION_CASES.items() if case.spark]


@pytest.fixture(scope="module", params=MADE_BY)
def earlier(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, Path]]:
    """A fleet with the states of a version, and the folder of its files."""
    folder = unpack(DATA / f"{request.param}.zip", tmp_path_factory.mktemp("earlier"))
    fleet = connect(f"file://{folder / 'fleet'}")
    yield fleet, folder
    fleet.shutdown()


def goes_on(spark: SparkSession, states: VersionCase, checkpoint: Path, folder: Path) -> None:
    """Run the second half of a case from a checkpoint of the fleet, beside Spark, which runs all of it."""
    everything = Inputs(spark, folder / "everything", states.case.inputs)
    before, after = states.halves
    with ExitStack() as ended:
        oracle = None
        if states.case.spark:
            oracle = System(states.case, everything, on_spark, folder / "oracle")
            ended.callback(oracle.stop)
            for step in before:
                everything.add(step.rows)
                oracle.take()
            oracle.restart()
        system = System(states.case, states.inputs, states.operators, checkpoint)
        ended.callback(system.stop)
        for step in after:
            states.inputs.add(step.rows)
            everything.add(step.rows)
            batches = system.take()
            rows = sorted(itertools.chain(*batches.values()), key=repr)
            assert step.out is None or rows == sorted(step.out, key=repr), batches
            # By their text, in which a NaN is one.
            assert oracle is None or repr(batches) == repr(oracle.take())


@pytest.mark.parametrize("name", short_list(VERSION_CASES, FEW))
def test_a_query_goes_on_with_another_version(
    spark: SparkSession, earlier: tuple[Fleet, Path], name: str, tmp_path: Path
) -> None:
    fleet, folder = earlier
    states = VersionCase(spark, fleet, name, folder / "in" / name)
    goes_on(spark, states, folder / "checkpoints" / name, tmp_path)


@pytest.mark.parametrize("case_name", short_list(IMPORTED, ["windows"]))
@pytest.mark.parametrize("version", MADE_BY)
def test_a_checkpoint_of_another_version_is_imported(
    spark: SparkSession, fleet: Fleet, name: str, version: str, case_name: str, tmp_path: Path
) -> None:
    folder = unpack(DATA / f"{version}.zip", tmp_path / "earlier")
    states = VersionCase(spark, fleet, case_name, folder / "in" / case_name, states=name)
    old, new = folder / "spark" / case_name, tmp_path / "new"
    frame = states.case.query(states.operators, states.inputs.streams())
    fleet.import_checkpoint(str(old), frame, checkpoint=str(new))
    goes_on(spark, states, new, tmp_path)
