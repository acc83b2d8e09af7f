"""Measure what one part of the fleet costs: ``python -m benchmarks.costs hot_keys --json result.json``.

Each measurement is a module beside this one, whose docstring says what it measures.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

#: Each measurement with a line of help. Only the module of the one that runs is imported: several must run without Ray or Spark.
MEASUREMENTS = {
    "cores": "how many cores one store actor's process keeps busy",
    "drivers": "what 200 Ray drivers on one node cost",
    "engine": "what the engine alone costs a row, on one core",
    "eviction": "what closing state costs, by how much is closed and how much there is",
    "hot_keys": "what counting a shard's hottest keys costs a store actor",
    "loading": "how fast a shard is written as a snapshot and loaded again",
    "maintenance": "what snapshots cost the batches beside them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a measurement and print its figures."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=(__doc__ or "").split("\n")[0])
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="measurement")
    for name, summary in MEASUREMENTS.items():
        subparser = measurements.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in arguments:
            module = importlib.import_module(f"benchmarks.costs.{name}")
            subparser.description = module.__doc__
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    options.run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
