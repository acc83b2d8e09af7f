"""The benchmark: Statefleet beside Spark's own state stores and the same queries without state, in one run of about ten minutes.

``./run bench``; ``./run bench --quick`` for a check of two minutes that fails if a ratio is beyond its margin

It prints a table, and writes ``build/bench/results.json``. How the sides take turns is in :mod:`benchmarks.harness`; the lines are in
:mod:`benchmarks.lines`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import cores, fairness, scratch, session, some_of
from benchmarks.lines import FULL, QUICK, Line, ProgramLine, Row
from benchmarks.table import missed, page

_ROOT = Path(__file__).parents[1]


def _facts() -> dict[str, Any]:
    """Return the machine and what ran on it before, the versions, the date and the commit."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ("statefleet", "pyspark", "ray", "pyarrow", "numpy")
    return {
        "machine": {
            "cores": cores(),
            "architecture": platform.machine(),
            "memory_gib": round(memory / 2**30, 1),
            "load": round(os.getloadavg()[0], 1),
            "system": f"{platform.system()} {platform.release().split('-')[0]}",
        },
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git.stdout.strip() or "unknown",
    }


def _rows(lines: Sequence[Line], options: argparse.Namespace) -> Iterator[Row]:
    """Measure all lines. What needs no session comes first, when there is none yet."""
    alone = [line for line in lines if isinstance(line, ProgramLine)]
    with scratch(options) as root:
        for line in alone:
            print(f"bench: {line.title}", flush=True)
            yield from line.run(None, root / line.name)
    with_spark = [line for line in lines if line not in alone]
    if not with_spark:
        return
    with session("statefleet-bench", options) as (spark, root):
        for line in with_spark:
            print(f"bench: {line.title}", flush=True)
            rows = line.run(spark, root / line.name)
            if options.quick and missed(rows):
                # Noise seldom comes twice.
                again = line.run(spark, root / f"{line.name}-again")
                rows = min(rows, again, key=lambda measured: len(missed(measured)))
            shutil.rmtree(root / line.name, ignore_errors=True)
            yield from rows


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two minutes, and exit code 1 on a regression")
    names = list(dict.fromkeys(line.name for line in (*FULL, *QUICK)))
    parser.add_argument("--only", type=some_of("line", names), help=f"some of {','.join(names)}")
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "bench", help="folder of the figures")
    parser.add_argument("--folder", type=Path, help="where to put input and state (default: a temporary folder)")
    parser.add_argument("--executor-memory", default="6g", help="of the Spark executor (%(default)s)")
    parser.set_defaults(shards=4)
    options = parser.parse_args(argv)
    kind, lines = ("quick", QUICK) if options.quick else ("full", FULL)
    options.lines = [line for line in lines if options.only is None or line.name in options.only]
    if not options.lines:
        parser.error(f"a {kind} run has {', '.join(line.name for line in lines)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a ratio of a quick run is beyond its margin."""
    options = _parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    rows: list[Row] = []
    results = {**_facts(), "rows": rows}
    for row in _rows(options.lines, options):
        rows.append(row)
        # After each row: a run that is killed has given those before.
        results["seconds"] = time.monotonic() - started
        (options.out / "results.json").write_text(json.dumps(results, indent=2))
    print(f"{fairness()}\n\nratios of median batches (and quartiles of the batches' ratios)\n\n{page(results)}")
    print(f"\nbench: {results['seconds']:.0f} s; all figures: {options.out / 'results.json'}")
    regressions = missed(rows)
    for sentence in regressions:
        print(f"bench: {'regression' if options.quick else 'missed'}: {sentence}", file=sys.stderr)
    return int(bool(regressions) and options.quick)


if __name__ == "__main__":
    sys.exit(main())
