"""Access logs in Apache's combined format, parsed on the JVM (no row passes through Python)."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

#: host ident user [time] "method path protocol" status bytes "referer" "agent". The quoted parts repeat possessively (``*+``):
#: otherwise Java recurses once for each character, and a long agent, which any client can send, would overflow the executor's stack.
#: A line may end anywhere from the referer on, as lines that were cut to a length do; the fields before are complete.
_LINE = (
    r'^(\S+) (\S+) (\S+) \[([^\]]+)\] "(\S+) (\S+)(?: ([^"]*))?" (\d{3}) (\d+|-)'
    r'(?: "((?:[^"\\]|\\.)*+)(?:\\?$|"(?:$| "((?:[^"\\]|\\.)*+)(?:\\?$|"))))?\s*$'
)
_TIME = "dd/MMM/yyyy:HH:mm:ss Z"


def parse_log(lines: DataFrame) -> DataFrame:
    """Return columns client, ts, method, path, status, bytes of a DataFrame with ``value``; and raw, reason.

    A line that is not in combined (or common) format, whose end may be missing, or has an impossible time, gets a reason instead of
    columns.
    """

    def group(number: int) -> Column:
        return F.regexp_extract("value", _LINE, number)

    parsed = lines.select(
        F.col("value").alias("raw"),
        group(1).alias("client"),
        # try_to_timestamp: an impossible date is a malformed line, not the end of the job.
        F.try_to_timestamp(group(4), F.lit(_TIME)).alias("ts"),
        group(5).alias("method"),
        F.regexp_replace(group(6), r"[?#].*$", "").alias("path"),
        group(8).alias("status"),
        group(9).alias("bytes"),
    )
    # What is not a number, such as "-" (nothing sent), becomes null, in ANSI mode, too.
    numbers = {name: F.expr(f"try_cast({name} AS {kind})") for name, kind in (("status", "INT"), ("bytes", "BIGINT"))}
    reason = F.when(F.col("client") == "", "not in combined log format").when(
        F.col("ts").isNull(), "time cannot be read"
    )
    return parsed.withColumns(numbers | {"reason": reason})


def read_log(spark: SparkSession, path: str, files_per_trigger: int) -> DataFrame:
    """Return a streaming DataFrame of a file or folder of access logs, parsed."""
    return parse_log(spark.readStream.option("maxFilesPerTrigger", files_per_trigger).text(path))
