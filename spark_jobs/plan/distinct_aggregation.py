"""An aggregation with DISTINCT in Spark's plan, and the one without it that has the same results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from spark_jobs.plan.stateful_exchange import jvm_classes


@dataclass(frozen=True)
class DistinctAggregation:
    """An aggregation of which some aggregates take each value of a group once (``DistinctAggregation.scala``)."""

    _java: Any
    _spark: SparkSession

    @classmethod
    def of(cls, aggregated: DataFrame) -> DistinctAggregation | None:
        """Return the aggregation that a frame is; None if it has no DISTINCT."""
        spark = aggregated.sparkSession
        found = jvm_classes(spark).distinctAggregation(aggregated._jdf)
        return None if found is None else cls(found, spark)

    def sets(self) -> Iterator[tuple[str, DataFrame]]:
        """Yield for each set of values that is aggregated its expressions in SQL, and groups and values of each row."""
        for number in range(self._java.size()):
            yield self._java.text(number), DataFrame(self._java.rows(number), self._spark)

    def over(self, first_rows: Sequence[DataFrame]) -> DataFrame:
        """Return the aggregation over the first rows of each set, in the order of :meth:`sets`, and over all rows."""
        return DataFrame(self._java.over([rows._jdf for rows in first_rows]), self._spark)
