"""``quickstart``: the main job, from any folder."""

from __future__ import annotations

import typer


def quickstart(context: typer.Context) -> None:
    """Run the main job: counts of events, in a local fleet.

    It needs no server: a local Ray with Spark on it, and files below ./statefleet-data.
    """
    # Late: no other command needs Spark.
    from coordinator.runtime.extras import import_extra

    raise typer.Exit(import_extra("spark_jobs.quickstart").main(context.args, program="statefleet quickstart"))
