"""Checkpoints that Spark 2.1 to 4.0 wrote for Spark's own suites go on in the fleet as in Spark, or are refused with what to do.

Spark's tests jars, from Maven Central, have the checkpoints (`./run golden`). docs/migration.md has a table of what is seen here.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from coordinator.model.errors import CorruptStateError, InvalidRequestError, StateMismatchError
from spark_jobs.plan.catalyst import java_class
from spark_jobs.plan.spark_version import SPARK
from statefleet.fleet import Fleet
from tests.integration.case_systems import configured, on_fleet, on_spark
from tests.integration.golden_cases import AFTER_A_BATCH, BY_SPARK, GOLDEN, IMPORTED, OF_FORMAT_1, SAYS, Batch, Golden
from tests.integration.operator_cases import Operators
from tests.integration.streams import Run
from tests.maven_jars import maven_jars

pytestmark = pytest.mark.golden

JARS = (
    "org.apache.spark:spark-sql_2.12:3.5.7:tests e1e815834c9c5c16d4d403d81b8ee91955a35542d112080a9ffe2c08969a00a4",
    "org.apache.spark:spark-sql_2.13:4.2.0:tests 810bef6fd568e1626aad7354a1161e9e5ac629fbc55ba0a9a4e3cec8c06376eb",
)
_FOLDER = "structured-streaming/checkpoint-version-"
IS_SPARK_4 = SPARK.READS_STATE


class Source:
    """A source of Spark's suites, whose offsets are numbers of batches."""

    def __init__(self, spark: SparkSession, golden: Golden) -> None:
        self._spark, self._columns = spark, golden.source
        encoder = java_class("org.apache.spark.sql.catalyst.encoders.ExpressionEncoder")
        schema = spark.createDataFrame([], golden.source)._jdf.schema()
        package = "execution.streaming.runtime" if IS_SPARK_4 else "execution.streaming"
        stream = java_class(f"org.apache.spark.sql.{package}.MemoryStream")
        self._stream = stream.apply(encoder.apply(schema), spark._jsparkSession.sqlContext())
        for batch in golden.before:
            self.add(batch)

    def add(self, rows: Batch) -> None:
        stored = self._spark.createDataFrame(list(rows), self._columns)._jdf.collectAsList()
        self._stream.addData(java_class("org.apache.spark.api.python.PythonUtils").toSeq(stored))

    def frame(self) -> DataFrame:
        return DataFrame(self._stream.toDF(), self._spark)


class System:
    """The query of a checkpoint, on Spark or on the fleet, with a source of its own."""

    def __init__(self, spark: SparkSession, golden: Golden, operators: Operators, checkpoint: Path) -> None:
        self._golden, self._checkpoint = golden, checkpoint
        self.source = Source(spark, golden)
        self.frame = golden.query(operators, self.source.frame())

    def start(self) -> None:
        self.run = Run(self.frame, self._golden.mode, self._checkpoint)

    def take(self, rows: Batch) -> dict[int, list[tuple[Any, ...]]]:
        """Return what each batch emits after further rows."""
        self.source.add(rows)
        return self.run.take_batches()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the checkpoints of Spark's suites."""
    folder = tmp_path_factory.mktemp("golden")
    for jar in maven_jars(JARS):
        with zipfile.ZipFile(jar) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(_FOLDER)])
    return folder


def copied(checkpoints: Path, golden: Golden, target: Path) -> Path:
    # Some files were edited after Spark had written them with their checksums.
    shutil.copytree(checkpoints / f"{_FOLDER}{golden.folder}", target, ignore=shutil.ignore_patterns("*.crc"))
    return target


def test_every_checkpoint_of_the_jars_is_here(checkpoints: Path) -> None:
    present = {str(path.parent.relative_to(checkpoints)) for path in checkpoints.rglob("metadata") if path.is_file()}
    assert {folder for folder in present if "_metadata" not in folder} == {
        f"{_FOLDER}{golden.folder}" for golden in GOLDEN
    }


@pytest.mark.parametrize("golden", [pytest.param(golden, id=golden.folder) for golden in GOLDEN])
def test_a_checkpoint_of_sparks_suites(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, checkpoints: Path, golden: Golden
) -> None:
    outcome = golden.outcomes[IS_SPARK_4]
    old, new = copied(checkpoints, golden, tmp_path / "old"), tmp_path / "new"
    with configured(spark, golden.conf):
        fleets, steps, running = (
            System(spark, golden, on_fleet(fleet, name, shards=3), new),
            list(golden.steps),
            list[System](),
        )

        def refused(says: str) -> None:
            with pytest.raises((CorruptStateError, InvalidRequestError, StateMismatchError), match=SAYS[says]):
                fleet.import_checkpoint(str(old), fleets.frame, checkpoint=str(new))
            assert not new.exists()

        try:
            if outcome in (AFTER_A_BATCH, OF_FORMAT_1, BY_SPARK):
                refused(AFTER_A_BATCH)
                sparks = System(spark, golden, on_spark, old)
                rows, expected = steps.pop(0)
                fleets.source.add(rows)
                sparks.start()
                running.append(sparks)
                if outcome == BY_SPARK:
                    with pytest.raises(StreamingQueryException):
                        sparks.take(rows)
                    return
                check(golden, sparks.take(rows), expected)
                sparks.run.stop()
            if outcome not in (AFTER_A_BATCH, IMPORTED):
                refused(outcome)
                return
            fleet.import_checkpoint(str(old), fleets.frame, checkpoint=str(new))
            if outcome == IMPORTED:
                sparks = System(spark, golden, on_spark, old)
            for system in (sparks, fleets):
                system.start()
                running.append(system)
            for rows, expected in steps:
                emitted, by_spark = fleets.take(rows), sparks.take(rows)
                assert repr(emitted) == repr(by_spark)
                check(golden, by_spark, expected)
        finally:
            for system in running:
                system.run.stop()


def check(golden: Golden, emitted: Mapping[int, Batch], expected: Batch) -> None:
    batches = [rows for rows in emitted.values() if rows]
    rows = batches[-1] if golden.mode == "complete" else [row for batch in batches for row in batch]
    assert rounded(rows) == rounded(expected)


def rounded(rows: Batch) -> list[str]:
    """Return rows as text, sorted; numbers that are equal to nine digits are the same."""
    return sorted(
        repr([f"{float(part):.9g}" if isinstance(part, (int, float, Decimal)) else part for part in row])
        for row in rows
    )


def test_the_table_of_the_documentation_says_what_was_seen() -> None:
    page = Path(__file__).parents[2] / "docs/migration.md"
    rows = {(golden.version, golden.operator, *golden.outcomes) for golden in GOLDEN}
    lines = re.findall(r"^\| (\d\.\d\.\d[\d., ]*) \| (.+?) \| (.+?) \| (.+?) \|$", page.read_text(), re.MULTILINE)
    written = [(version, *rest) for versions, *rest in lines for version in versions.split(", ")]
    assert sorted(written) == sorted(rows)
