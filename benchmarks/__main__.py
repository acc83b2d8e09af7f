"""The benchmark: Statefleet beside Spark's own state stores and the same queries without state, in one run of about ten minutes.

``./run bench``, or ``./run bench --quick`` for a check of two minutes that fails if a ratio is beyond its margin

It prints a table, and writes ``build/bench/results.json`` and a page with charts, ``build/bench/index.html``. How the sides take
turns is in :mod:`benchmarks.harness`; the lines are in :mod:`benchmarks.lines`.
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
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from benchmarks.harness import SMALL_SPLITS, cores, fairness, scratch, session, some_of
from benchmarks.lines import FULL, QUICK, ROCKSDB, EngineLine, Line, Row, Step
from benchmarks.page import page
from benchmarks.table import missed, table

_ROOT = Path(__file__).parents[1]
#: About how long it takes until a session can run queries, for the progress bar.
_SESSION_S = 20.0


class _Bar:
    """A bar of the whole run on the terminal, or a line of text for each line that is done."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._total, self._done = sum(line.expected_s for line in lines) + _SESSION_S, 0.0
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("bench", total=self._total)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def part(self, text: str, expected_s: float) -> Iterator[Step]:
        """Show a part of the run; yields a function that takes the share of it that is done."""
        self._progress.update(self._task, description=text)
        started = time.monotonic()
        yield lambda share: self._progress.update(self._task, completed=self._done + share * expected_s)
        self._done += expected_s
        self._progress.update(self._task, completed=self._done)
        share = f"{100 * self._done / self._total:3.0f} %"
        self._console.print(f"bench: {share}  {text}: {time.monotonic() - started:.0f} s", highlight=False)


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


def _rows(bar: _Bar, lines: Sequence[Line], options: argparse.Namespace) -> Iterator[Row]:
    """Measure all lines. What needs no session comes first, when there is none yet."""
    alone = [line for line in lines if isinstance(line, EngineLine)]
    with scratch(options) as root:
        for line in alone:
            with bar.part(line.title, line.expected_s) as step:
                yield from line.run(None, root / line.name, step)
    with_spark = [line for line in lines if line not in alone]
    if not with_spark:
        return
    with ExitStack() as stack:
        with bar.part("Spark and Ray start", _SESSION_S):
            spark, root = stack.enter_context(session("statefleet-bench", options, SMALL_SPLITS))
        for line in with_spark:
            with bar.part(line.title, line.expected_s) as step:
                rows = line.run(spark, root / line.name, step)
                if options.quick and missed(rows):
                    # Noise seldom comes twice.
                    again = line.run(spark, root / f"{line.name}-again", step)
                    rows = min(rows, again, key=lambda measured: len(missed(measured)))
            shutil.rmtree(root / line.name, ignore_errors=True)
            yield from rows


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two minutes, and exit code 1 on a regression")
    names = list(dict.fromkeys(line.name for line in (*FULL, *QUICK)))
    parser.add_argument("--only", type=some_of("line", names), help=f"some of {','.join(names)}")
    parser.add_argument(
        "--rocksdb", action="store_true", help="Spark's RocksDB store also where it takes minutes: 5 M keys, operators"
    )
    parser.add_argument(
        "--out", type=Path, default=_ROOT / "build" / "bench", help="folder of the page and of the figures"
    )
    parser.add_argument("--folder", type=Path, help="where to put input and state (default: a temporary folder)")
    parser.add_argument("--executor-memory", default="6g", help="of the Spark executor (%(default)s)")
    parser.set_defaults(shards=4)
    options = parser.parse_args(argv)
    lines = QUICK if options.quick else FULL
    options.lines = [line for line in lines if options.only is None or line.name in options.only]
    if not options.lines:
        parser.error(f"a {'quick' if options.quick else 'full'} run has {', '.join(line.name for line in lines)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a ratio of a quick run is beyond its margin, or a side of the fleet failed."""
    options = _parse(argv)
    lines = options.lines
    for side in [ROCKSDB] * options.rocksdb:
        lines = [line.beside(side) for line in lines]
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    rows: list[Row] = []
    results = {**_facts(), "quick": options.quick, "fairness": fairness(), "rows": rows}
    with _Bar(lines) as bar:
        for row in _rows(bar, lines, options):
            rows.append(row)
            # After each row: a run that is killed has given those before.
            results["seconds"] = time.monotonic() - started
            (options.out / "results.json").write_text(json.dumps(results, indent=2))
            (options.out / "index.html").write_text(page(results))
    print(table(results))
    print(
        f"\nbench: {results['seconds']:.0f} s; charts: {options.out / 'index.html'}, all figures: {options.out / 'results.json'}"
    )
    regressions = missed(rows)
    for sentence in regressions:
        print(f"bench: {'regression' if options.quick else 'missed'}: {sentence}", file=sys.stderr)
    return int(bool(regressions) and options.quick)


if __name__ == "__main__":
    sys.exit(main())
