"""The process that forks Spark's Python workers (``spark.python.daemon.module``), which checks Statefleet's import names first.

An executor may find other modules than the driver did, such as those in the folder that it was started in.
"""

from __future__ import annotations

from spark_jobs.worker.daemon import main

if __name__ == "__main__":
    main()
