"""Lines of Spark's versions. No PySpark: the doctor also runs where there is none."""

from __future__ import annotations


def line_of(version: str) -> str:
    """Return the line of a version of Spark, which is also the name of the extra that installs it."""
    if version.startswith("3."):
        return "spark35"
    return "spark43" if version.startswith("4.3.") else "spark4"
