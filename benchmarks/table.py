"""The benchmark's figures as a table: on the terminal, and in ``docs/performance.md``.

``python -m benchmarks.table build/bench/results.json`` writes the table of a full run into that page, between its two marks.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import FLEET, PLAIN, SHUFFLED, SPARK_STORES
from coordinator.model.text import format_table

HDFS, ROCKSDB = SPARK_STORES
#: What readers call the sides.
NAMES = {
    PLAIN: "plain shuffle",
    FLEET: "Statefleet",
    SHUFFLED: "Statefleet in two stages",
    HDFS: "Spark HDFSBacked",
    ROCKSDB: "Spark RocksDB",
}
#: The first columns of ratios.
_RATIOS = (f"{FLEET} / {PLAIN}", f"{FLEET} / {SHUFFLED}", f"{HDFS} / {FLEET}", f"{ROCKSDB} / {FLEET}")
_FIGURES = {
    "upsert_ns": "upsert, ns a row",
    "get_ns": "get, ns a row",
    "remove_ns": "remove, ns a row",
    "fold_ns": "count and sum, ns a row",
    "table_ns": "upsert in a hash table that does nothing else, ns a row",
    "bytes_a_key": "memory, bytes a key",
}
_BEGIN, _END = "<!-- the table of ./run bench -->\n", "<!-- its end -->\n"
_BETWEEN = re.compile(f"(?<={re.escape(_BEGIN)}).*(?={re.escape(_END)})", re.DOTALL)


def _said(ratio: str) -> str:
    """Return the name of a ratio in readers' words."""
    return " / ".join(NAMES.get(side, side) for side in ratio.split(" / "))


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(row: Mapping[str, Any], name: str) -> str:
    """Return a ratio of a row with its quartiles; empty if it was not measured."""
    for ratio in row["ratios"]:
        if ratio["ratio"] == name:
            span = " ({} to {})".format(*map(_number, ratio["quartiles"])) if "quartiles" in ratio else ""
            return f"{'> ' if ratio['is_lower_bound'] else ''}{_number(ratio['value'])}{span}"
    return ""


def _seconds(row: Mapping[str, Any]) -> str:
    """Return the fleet's seconds, and those above the plain query."""
    fleet = row["sides"].get(FLEET, {})
    if "median_s" not in fleet:
        return "failed"
    above = row.get("above_plain_s")
    return f"{fleet['median_s']:.3f}" + (f" (plain + {above['median']:.3f})" if above else "")


def _compared(rows: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and cells of all rows with sides, those columns that have a figure."""
    rows = [row for row in rows if "figures" not in row]
    measured = [ratio["ratio"] for row in rows for ratio in row["ratios"]]
    ratios = [name for name in dict.fromkeys((*_RATIOS, *measured)) if name in measured]
    columns = ["", "a batch", *map(_said, ratios), "Statefleet, s"]
    return columns, [
        [row["title"], row["detail"], *(_ratio(row, name) for name in ratios), _seconds(row)] for row in rows
    ]


def figures_table(row: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and cells of a row of figures: what is measured, by kind of key."""
    kinds = list(row["figures"])
    cells = [
        [text, *(f"{kind[name]:,.0f}" if name in kind else "" for kind in row["figures"].values())]
        for name, text in _FIGURES.items()
    ]
    return ["", *kinds], cells


def ran_on(results: Mapping[str, Any]) -> str:
    """Return the machine, the versions and the date in a sentence."""
    machine, versions = results["machine"], results["versions"]
    named = ", ".join(f"{name} {number}" for name, number in versions.items() if name != "statefleet")
    hardware = f"{machine['cores']} cores ({machine['architecture']}), {machine['memory_gib']} GiB, {machine['system']}"
    ran = f"{results['date']}, {results['seconds'] / 60:.0f} minutes, load average {machine['load']} before it"
    return f"Statefleet {versions['statefleet'].split('+')[0]} ({results['commit']}) with {named}; {hardware}; {ran}."


def missed(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each ratio beyond its margin, and for each side of the fleet that failed."""
    sentences = []
    for row in rows:
        where = f"{row['title']} ({row['detail']})"
        for ratio in row["ratios"]:
            if ratio.get("met") is False:
                spread = (
                    " (quartiles {} to {})".format(*map(_number, ratio["quartiles"])) if "quartiles" in ratio else ""
                )
                sentences.append(
                    f"{where}: {_said(ratio['ratio'])} is {_number(ratio['value'])}{spread}; expected is {ratio['target']}"
                )
        for side, figures in row["sides"].items():
            if side.startswith(FLEET) and "failure" in figures:
                sentences.append(f"{where}: {_said(side)}: {figures['failure'].splitlines()[0]}")
    return sentences


def table(results: Mapping[str, Any]) -> str:
    """Return the table for a terminal."""
    parts = [
        f"{results['fairness']}\n{ran_on(results)}\n\nratios of median batches (and quartiles of the batches' ratios)"
    ]
    columns, cells = _compared(results["rows"])
    if cells:
        parts.append(format_table(columns, cells))
    for row in results["rows"]:
        if "figures" in row:
            parts += [f"\n{row['title']}: {row['detail']}", format_table(*figures_table(row))]
    return "\n".join(parts)


def _markdown_table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *cells]
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |").replace("|  |", "| |") for row in rows)


def markdown(results: Mapping[str, Any]) -> str:
    """Return the tables for a page of the documentation."""
    parts = [f"{ran_on(results)}\n", _markdown_table(*_compared(results["rows"]))]
    for row in results["rows"]:
        if "figures" in row:
            parts += [f"{row['title'].capitalize()}: {row['detail']}.\n", _markdown_table(*figures_table(row))]
    return "\n".join(parts)


def with_table(page: str, results: Mapping[str, Any]) -> str:
    """Return a page with the table between its marks replaced.

    Raises
    ------
    ValueError
        The page has no marks.
    """
    changed, count = _BETWEEN.subn(lambda _: f"\n{markdown(results)}\n", page)
    if count != 1:
        raise ValueError("the page has no marks for the table")
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table of a run into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=(__doc__ or "").split("\n")[0])
    root = Path(__file__).parents[1]
    parser.add_argument("results", type=Path, nargs="?", default=root / "build" / "bench" / "results.json")
    parser.add_argument("--page", type=Path, default=root / "docs" / "performance.md", help="the page (%(default)s)")
    options = parser.parse_args(argv)
    results = json.loads(options.results.read_text())
    if not results["is_documented"]:
        parser.error("these are figures of a quick or large run; the page has those of a full one")
    options.page.write_text(with_table(options.page.read_text(), results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
