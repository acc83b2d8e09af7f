"""``python -m tests.simulation --seed N`` replays a schedule; ``--seeds N [--from M]`` runs many, on every core."""

from __future__ import annotations

import argparse
import sys
import traceback

from tests.simulation.continuous_world import run_continuous
from tests.simulation.survey import survey
from tests.simulation.world import Outcome, run_seed

#: Kinds of schedules of continuous queries only.
_CONTINUOUS = {
    "drivers": "other drivers of the query at times",
    "windows": "event time, and groups that end",
    "held": "event time, and rows that are held until the seal",
    "duplicates": "rows of which only the first is emitted",
    "sessions": "session windows",
    "functions": "a user's function, which is called in Python workers",
}


def main() -> int:
    """Run what was asked; 1 if a schedule failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--seed", type=int, help="run this schedule and print its trace")
    mode.add_argument(
        "--seeds", type=int, help="run this many schedules of batches, and a third as many continuous ones"
    )
    parser.add_argument("--from", type=int, default=0, dest="first", help="first of --seeds")
    parser.add_argument("--jobs", type=int, help="processes (default: one a core)")
    parser.add_argument("--continuous", action="store_true", help="only schedules of continuous queries")
    parser.add_argument("--harsh", action="store_true", help="with --seed: the worst faults there are")
    parser.add_argument("--rescales", action="store_true", help="with --seed: a state that is rescaled")
    for kind, help_text in _CONTINUOUS.items():
        parser.add_argument(f"--{kind}", action="store_true", help=f"with --continuous --seed: {help_text}")
    arguments = parser.parse_args()
    if arguments.seed is None:
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        return survey(seeds, arguments.jobs, continuous=arguments.continuous)
    if arguments.continuous:
        kind = {kind: True for kind in ("harsh", "rescales", *_CONTINUOUS) if getattr(arguments, kind)}
        return replay(run_continuous(arguments.seed, **kind))
    keyed = False if arguments.rescales else None
    return replay(run_seed(arguments.seed, harsh=arguments.harsh, keyed=keyed, rescales=arguments.rescales))


def replay(outcome: Outcome) -> int:
    """Print all of a schedule."""
    print(outcome.report())
    if outcome.error is None:
        return 0
    traceback.print_exception(outcome.error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
