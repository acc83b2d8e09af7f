"""The process that forks Spark's Python workers (through ``statefleet.worker_daemon``): it imports once what every worker needs.

A worker forked from it starts with everything loaded, in memory that all workers of the executor share. Sessions that
:func:`~spark_jobs.session.spark_session.start_session` makes use it; in any other session the workers import for themselves.
"""

from __future__ import annotations

import sys

from coordinator.runtime.runtime import freeze_imports

__all__ = ["main", "settle_process"]


def settle_process() -> None:
    """Spare a worker two costs that PySpark pays again for every task and that grow with what is imported.

    - It invalidates the import caches, and Spark puts a jar of its own on the workers' path, whose directory of thousands of
      entries Python's zip importer then reads again: 0.05 to 0.2 s a task. No Python module is in it.
    - It runs a full garbage collection, which need not look at what was imported.
    """
    sys.path[:] = [path for path in sys.path if not path.endswith(".jar")]
    # The cache has entries for folders inside the jar, too.
    for path in [path for path in sys.path_importer_cache if ".jar" in path]:
        del sys.path_importer_cache[path]
    freeze_imports()


def main() -> None:
    """Import, then serve as PySpark's own daemon does."""
    from pyspark.daemon import manager

    import store_actors.engine.table  # noqa: F401

    settle_process()
    manager()  # type: ignore[no-untyped-call]
