"""A JVM with Statefleet's classes, without a Spark session: what their own tests run in."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

from spark_jobs.jvm.build import present_jar
from spark_jobs.session.java import choose_java_home

PACKAGE = "org.apache.spark.sql.statefleet"
CATALYST = "org.apache.spark.sql.catalyst"


class Jvm:
    """A JVM and the objects of it that tests need."""

    def __init__(self) -> None:
        conf = SparkConf(loadDefaults=False).set("spark.driver.extraClassPath", str(present_jar()))
        os.environ["JAVA_HOME"] = str(choose_java_home(os.environ))
        self.gateway = launch_gateway(conf)

    def named(self, name: str) -> Any:
        """Return a class by its full name."""
        found: Any = self.gateway.jvm
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def own(self, name: str) -> Any:
        """Return a class of Statefleet's."""
        return self.named(f"{PACKAGE}.{name}")

    def module(self, name: str) -> Any:
        """Return a Scala object by its full name."""
        return getattr(self.named(f"{name}$"), "MODULE$")

    def seq(self, items: Sequence[Any]) -> Any:
        """Return a Scala Seq."""
        return self.named("org.apache.spark.api.python.PythonUtils").toSeq(list(items)).toList()

    def ints(self, numbers: Sequence[int]) -> Any:
        """Return a Java array."""
        array = self.gateway.new_array(self.gateway.jvm.int, len(numbers))
        for index, number in enumerate(numbers):
            array[index] = number
        return array

    def struct(self, columns: Mapping[str, str]) -> Any:
        """Return a type of rows, by the names and SQL types of its columns."""
        text = ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
        return self.named("org.apache.spark.sql.types.StructType").fromDDL(text)

    @cached_property
    def task(self) -> Any:
        """The context of a task."""
        return self.new_task()

    def new_task(self) -> Any:
        """Return the context of another task."""
        return self.module("org.apache.spark.TaskContext").empty()

    def rows(self, columns: Mapping[str, str], counts: Mapping[int, int], texts: Sequence[bytes] = ()) -> Any:
        """Return an iterator of rows of a shuffle.

        Parameters
        ----------
        columns
            Types of columns by name: a number, counted from 0; then one of texts if there are any, else of nulls; and the route.
        counts
            The number of rows of each route.
        """
        total, kind = sum(counts.values()), self.struct(columns)
        vectors = self.named("org.apache.spark.sql.execution.vectorized.OnHeapColumnVector").allocateColumns(
            max(1, total), kind
        )
        vectors[0].putLongsLittleEndian(0, total, struct.pack(f"<{total}q", *range(total)), 0)
        if len(columns) > 2 and not texts:
            vectors[1].putNulls(0, total)
        for number, text in enumerate(texts):
            vectors[1].putByteArray(number, text)
        begin = 0
        for route, count in counts.items():
            vectors[len(columns) - 1].putInts(begin, count, route)
            begin += count
        columnar = self.gateway.new_array(self.named("org.apache.spark.sql.vectorized.ColumnVector"), len(columns))
        for number in range(len(columns)):
            columnar[number] = vectors[number]
        batch = self.named("org.apache.spark.sql.vectorized.ColumnarBatch")(columnar, total)
        iterator = self.named("scala.collection.JavaConverters").asScalaIterator(batch.rowIterator())
        return iterator.map(self.named(f"{CATALYST}.expressions.UnsafeProjection").create(kind))

    def close(self) -> None:
        """End the JVM."""
        self.gateway.shutdown()
        self.gateway.proc.stdin.close()
        self.gateway.proc.wait(30)
