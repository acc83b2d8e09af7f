"""A streaming source that a test feeds batch by batch: a folder of Parquet files, one for each batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from spark_jobs.functions.grouped_input import struct_type
from spark_jobs.functions.values import RowValues
from spark_jobs.jobs.stream_files import write_file
from spark_jobs.plan.spark_version import SPARK

_FIRST_S = 1_700_000_000

#: A row of an input: the input's name and its values.
Input = tuple[str, Any]


class Inputs:
    """The inputs of a query as streams of one source, so that the rows of a batch arrive together, whichever input they are of.

    `columns` are those of each input, as Spark's type or in DDL.
    """

    def __init__(self, spark: SparkSession, columns: Mapping[str, T.StructType | str]) -> None:
        if not columns:
            raise InvalidRequestError("a query that is tested has at least one input")
        self._spark = spark
        self._types = {name: struct_type(definition, f"input {name}") for name, definition in columns.items()}
        self._values = {name: RowValues(kind, f"input {name}", needs_names=True) for name, kind in self._types.items()}
        # A row of the source is a row of one input; the other columns are null.
        self._schema = T.StructType([T.StructField(name, kind) for name, kind in self._types.items()])

    def rows(self, batch: Mapping[str, Sequence[Any]] | Sequence[Any]) -> list[Input]:
        """Return the rows of a batch that is given by input; of a single input also as rows.

        Raises
        ------
        InvalidRequestError
            There is no such input, or a row does not fit its columns.
        """
        if isinstance(batch, Mapping):
            by_input = batch
        elif len(self._types) == 1:
            by_input = dict.fromkeys(self._types, batch)
        else:
            raise InvalidRequestError(
                "give the rows of a batch by the input that they are of", inputs=list(self._types)
            )
        unknown = by_input.keys() - self._types.keys()
        if unknown:
            raise InvalidRequestError("there is no such input", unknown=sorted(unknown), inputs=list(self._types))
        return [(name, self._raw(name, row)) for name, rows in by_input.items() for row in rows]

    def _raw(self, name: str, row: Any) -> dict[str, Any]:
        """Return Arrow's values of a row, which is given as a tuple in the order of the columns, a dict or a Row."""
        columns = self._types[name]
        if isinstance(row, dict):
            unknown = row.keys() - set(columns.names)
            if unknown:
                raise InvalidRequestError(
                    f"input {name} has other columns than its input", unknown=sorted(unknown), columns=columns.names
                )
            row = tuple(row.get(column) for column in columns.names)
        raw = dict(zip(columns.names, self._values[name].raw(row), strict=True))
        for field in columns.fields:
            # Arrow would take a number for microseconds, which a user may have meant as seconds.
            if isinstance(field.dataType, T.TimestampType) and isinstance(raw[field.name], int | float):
                raise InvalidRequestError(
                    f"input {name} has a number for a time; give a datetime", column=field.name, got=raw[field.name]
                )
        return raw

    def write(self, folder: Path, number: int, rows: Sequence[Input]) -> None:
        """Write the rows of a batch as a file of a folder, in their order."""
        schema = SPARK.arrow_schema(self._schema)
        columns = [
            pa.array([row if of == name else None for of, row in rows], schema.field(name).type)
            for name in schema.names
        ]
        write_file(pa.table(columns, schema=schema), folder / f"{number:06d}.parquet", _FIRST_S + number)

    def streams(self, folder: Path) -> dict[str, DataFrame]:
        """Return the inputs as streaming DataFrames of the files of a folder, a file a batch."""
        reader = self._spark.readStream.schema(self._schema).option("maxFilesPerTrigger", 1)
        source = reader.option("pathGlobFilter", "*.parquet").parquet(str(folder))
        return {name: source.where(F.col(name).isNotNull()).select(f"{name}.*") for name in self._types}
