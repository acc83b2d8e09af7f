"""The process that forks Spark's Python workers (``spark.python.daemon.module``), which checks Statefleet's import names first.

An executor may find other modules than the driver did, such as those in the folder that it was started in. A worker starts with all
loaded, in memory that all workers of the executor share. Sessions of :func:`~spark_jobs.session.spark_session.start_session` use it;
in any other session the workers import for themselves.
"""

from __future__ import annotations

from pyspark.daemon import manager

import spark_jobs.functions.user_state_task  # noqa: F401  what the workers run
from spark_jobs.worker.process import settle_process

if __name__ == "__main__":
    settle_process()
    manager()  # type: ignore[no-untyped-call]
